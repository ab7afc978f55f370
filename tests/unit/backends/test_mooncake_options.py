"""Options of ``mooncake``: SGLang's names and order, and what is refused before anything is touched."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.backends.support import ENV, NOTHING, box

from hicache_hooks.backends.mooncake import SPEC, MooncakeStore
from hicache_hooks.backends.mooncake_client import Reaper, setup_arguments
from hicache_hooks.backends.mooncake_options import CONFIG_ENV, MooncakeOptions, endpoint
from hicache_hooks.backends.options import StoreFacts
from hicache_proto.errors import InvalidConfig, LayoutUnsupported
from hicache_proto.model import TargetState

MASTER = {"master_server_address": "10.0.0.1:50051"}


def effective(env: dict[str, str] | None = None, **options: Any) -> MooncakeOptions:
    return msgspec.convert({**MASTER, **options}, MooncakeOptions).effective(env or {})


def facts(**fields: Any) -> StoreFacts:
    return StoreFacts(**{"layout": "page_first", "page_bytes": 65536, "l2_pages": 100, **fields})


def test_sglangs_defaults() -> None:
    made = effective()
    assert made.global_segment_size == 4 << 30
    assert (made.local_hostname, made.metadata_server, made.protocol) == ("localhost", "P2PHANDSHAKE", "rdma")
    assert (made.tenant_id, made.master_metrics_port, made.check_server) == ("default", 9003, False)


def test_sglangs_example_carries_over() -> None:
    """Its README's extra config, whole."""
    made = effective(
        local_hostname="localhost", metadata_server="http://127.0.0.1:8080/metadata", global_segment_size="4gb",
        protocol="rdma", device_name="", tenant_id="tenant-a", enable_group_semantics=True, extra_backend_tag="t",
        enable_ssd_offload=True, ssd_offload_path="/mnt/ssd", check_server=True, master_metrics_port=9003,
    )  # fmt: skip
    args, keywords = setup_arguments(made, 1 << 30, "", "/mnt/ssd/x")
    assert args[:3] == ["localhost", "http://127.0.0.1:8080/metadata", 1 << 30]
    assert args[4:] == ["rdma", "", "10.0.0.1:50051"]
    assert keywords == {"enable_ssd_offload": True, "ssd_offload_path": "/mnt/ssd/x", "tenant_id": "tenant-a"}


def test_the_option_counts_before_the_file_before_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps({"master_server_address": "f:2", "local_hostname": "file", "unknown": 1, "protocol": None})
    )
    env = {
        CONFIG_ENV: str(path), "MOONCAKE_MASTER": "e:3", "MOONCAKE_LOCAL_HOSTNAME": "env", "MOONCAKE_PROTOCOL": "efa",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1gb", "MOONCAKE_CHECK_SERVER": "true",
    }  # fmt: skip
    made = MooncakeOptions(local_hostname="option").effective(env)
    assert (made.local_hostname, made.master_server_address, made.protocol) == ("option", "f:2", "efa")
    assert (made.global_segment_size, made.check_server) == (1 << 30, True)
    del env[CONFIG_ENV]
    assert MooncakeOptions().effective(env).master_server_address == "e:3"
    assert (
        MooncakeOptions().effective({**env, "MOONCAKE_LOCAL_HOSTNAME": "", "LOCAL_HOSTNAME": "l"}).local_hostname == "l"
    )


@pytest.mark.parametrize(
    ("options", "env", "key"),
    [
        ({"master_server_address": None}, {}, "master_server_address"),
        ({"master_server_address": "nohost"}, {}, "master_server_address"),
        ({"master_server_address": ":1"}, {}, "master_server_address"),
        ({"master_server_address": "h:99999"}, {}, "master_server_address"),
        ({"standalone_storage": True}, {}, "standalone_storage"),
        ({"master_server_address": None, "client_server_address": "h:1"}, {}, "standalone_storage"),
        ({"global_segment_size": "4 gigs"}, {}, "global_segment_size"),
        ({"device_name": "{0: bad}"}, {}, "device_name"),
        ({}, {"MOONCAKE_CHECK_SERVER": "perhaps"}, "check_server"),
        ({}, {"MOONCAKE_MASTER_METRICS_PORT": "x"}, "master_metrics_port"),
        ({}, {CONFIG_ENV: "/nowhere/x.json"}, CONFIG_ENV),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], env: dict[str, str], key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        effective(env, **options)
    assert caught.value.details["key"] == key


def test_a_config_file_of_the_wrong_types_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", json.dumps({"protocol": 5})):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(InvalidConfig):
            MooncakeOptions().effective({CONFIG_ENV: str(path)})


def test_the_segment_is_shared_by_the_ranks_and_holds_pages() -> None:
    """F49; SGLang shares it out by tp x pp."""
    made = effective(global_segment_size="8mb", protocol="tcp")
    assert made.segment_bytes(4) == 2 << 20
    assert made.check(facts(tp_size=4)) == []
    with pytest.raises(InvalidConfig):
        made.check(facts(tp_size=4, pp_size=4))
    assert "contributes" in effective(global_segment_size=0, protocol="tcp").check(facts())[0]


def test_rdma_without_a_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake falls back to tcp without a word."""
    monkeypatch.setattr("hicache_hooks.backends.mooncake_options.RDMA_DEVICES", "/nowhere")
    (warning,) = effective().check(facts())
    assert "no RDMA device" in warning


def test_devices_by_rank() -> None:
    made = effective(device_name='{"0": "ib0,ib1", "1": "ib2"}')
    assert [made.device_of(i) for i in range(3)] == ["ib0,ib1", "ib2", ""]
    assert effective(device_name="mlx5_0").device_of(7) == "mlx5_0"


def test_endpoints() -> None:
    assert endpoint("http://10.0.0.1:8080/metadata") == ("10.0.0.1", 8080)
    assert endpoint("[::1]:50051") == ("::1", 50051)
    for text in ("P2PHANDSHAKE", "etcd://a:1;b:2", "host", "host:", "host:0"):
        assert endpoint(text) is None, text


@pytest.mark.stores
def test_a_layout_that_has_no_page_buffers_is_refused_with_those_that_have() -> None:
    """F47: 422 naming the layout in use and the allowed ones."""
    target = TargetState(backend="mooncake", extra_config=json.dumps({**MASTER, "protocol": "tcp"}))
    box(layout="page_first", env=ENV).validate(target, NOTHING)
    with pytest.raises(LayoutUnsupported) as caught:
        box(layout="layer_first", env=ENV).validate(target, NOTHING)
    assert caught.value.details == {
        "layout": "layer_first",
        "allowed": ["page_first", "page_first_direct", "page_head"],
    }


def test_the_manifest_asks_for_registration_and_names_the_connection() -> None:
    assert MooncakeStore.manifest.needs_registration
    assert SPEC.inner(effective(protocol="tcp")) == "tcp"


def test_the_reaper_ends_what_answers_again_and_itself() -> None:
    """A client given up while its master was away is closed once, when the master is back."""
    ended = threading.Event()
    asked: list[int] = []

    def alive() -> bool:
        asked.append(1)
        return len(asked) >= 3

    reaper = Reaper(every_s=0.001)
    reaper.add(ended.set, alive)
    assert ended.wait(10)
    assert len(asked) == 3
    deadline = time.monotonic() + 10
    while reaper.waiting and time.monotonic() < deadline:
        time.sleep(0.001)  # pace of a poll
    assert reaper.waiting == 0
