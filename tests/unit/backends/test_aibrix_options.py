"""Options of ``aibrix``: each over its variable, connectors refused by name, settings seen by the vendor alone."""

import importlib.util
import json
import os
from typing import Any

import msgspec
import pytest
from tests.unit.backends.support import ENV, NOTHING, box

from hicache_hooks.backends import aibrix_options
from hicache_hooks.backends.aibrix import SPEC, manifest_of
from hicache_hooks.backends.aibrix_options import PREFIX, AibrixOptions
from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.options import StoreFacts
from hicache_proto.errors import BackendUnavailable, InvalidConfig
from hicache_proto.model import LAYOUTS, TargetState


def effective(env: dict[str, str] | None = None, **options: Any) -> AibrixOptions:
    full = {PREFIX + name: value for name, value in (env or {}).items()}
    return msgspec.convert(options, AibrixOptions).effective(full)


def facts(**fields: Any) -> StoreFacts:
    return StoreFacts(**{"layout": "page_first", "page_bytes": 65536, "l2_pages": 100, **fields})


@pytest.fixture(autouse=True)
def rocksdict_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are tests of options: the connector's package may be missing here."""
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: real("json") if name == "rocksdict" else real(name))


def test_each_option_counts_before_its_variable() -> None:
    env = {
        "L1_CACHE_CAPACITY_GB": "3", "L2_CACHE_BACKEND": "shfs", "ROCKSDB_ROOT": "/env", "SHFS_ROOT": "/shared",
        "ROCKSDB_TTL_S": "60",
    }  # fmt: skip
    made = effective(env)
    assert (made.l1_capacity_gb, made.l2_backend, made.inner) == (3.0, "SHFS", "L1+SHFS")
    made = effective(env, l1_capacity_gb=0, l2_backend="rocksdb", l2_options={"rocksdb_root": "/option"})
    assert (made.l1_capacity_gb, made.l2_backend, made.inner) == (0.0, "ROCKSDB", "ROCKSDB")
    seen = made.settings()
    assert seen[f"{PREFIX}ROCKSDB_ROOT"] == "/option"
    assert seen[f"{PREFIX}ROCKSDB_TTL_S"] == "60"
    assert (seen[f"{PREFIX}L1_CACHE_ENABLED"], seen[f"{PREFIX}L2_CACHE_BACKEND"]) == ("0", "ROCKSDB")
    assert made.settings(rocksdb_root="/slot")[f"{PREFIX}ROCKSDB_ROOT"] == "/slot"
    assert effective({"L1_CACHE_ENABLED": "0"}, l2_backend="SHFS").l1_capacity_gb == 0
    assert effective().l1_capacity_gb == 10.0
    assert effective({"L2_CACHE_BACKEND": "ROCKSDB"}, l2_backend="").inner == "L1"


def test_a_page_said_to_be_stored_reaches_l2_and_is_looked_for_there() -> None:
    """The vendor's defaults write to L2 at the second use, and look there only for four missing blocks or more."""
    seen = effective(l2_backend="SHFS").settings()
    assert seen[f"{PREFIX}L2_CACHE_INGESTION_TYPE"] == "ALL"
    assert seen[f"{PREFIX}DOUBLE_GET_THRESHOLD"] == "1"
    asked = effective(l2_backend="SHFS", l2_options={"l2_cache_ingestion_type": "HOT"}).settings()
    assert asked[f"{PREFIX}L2_CACHE_INGESTION_TYPE"] == "HOT"


def test_status_says_where_the_settings_come_from() -> None:
    """F75: the vendor's variables may decide what stores the pages."""
    env = {
        f"{PREFIX}{name}": value
        for name, value in (
            ("L2_CACHE_BACKEND", "rocksdb"), ("L1_CACHE_ENABLED", "1"), ("L1_CACHE_CAPACITY_GB", "2"),
            ("ROCKSDB_ROOT", "/env"), ("ROCKSDB_TTL_S", "0"),
        )
    }  # fmt: skip
    made = AibrixOptions(l2_options={"rocksdb_root": "/option"}).effective(env)
    assert made.source(env) == (
        f"options and {PREFIX}*: L1_CACHE_CAPACITY_GB, L1_CACHE_ENABLED, L2_CACHE_BACKEND, ROCKSDB_TTL_S"
    )
    assert made.source({}) == "options"
    given = AibrixOptions(l1_capacity_gb=0.0, l2_backend="SHFS", l2_options={"shfs_root": "/x"}).effective(env)
    assert given.source(env) == f"options and {PREFIX}*: ROCKSDB_ROOT, ROCKSDB_TTL_S"
    store: Any = SPEC.create(given, StoreContext(namespace="ns", page_bytes=8192, layout="page_first"), env)
    store._state.opened()  # no manager: health asks none
    assert store.health()["settings"] == given.source(env)


def test_names_may_be_the_variables_and_values_may_be_plain() -> None:
    made = effective(l2_backend="SHFS", l2_options={f"{PREFIX}L2_CACHE_OP_BATCH": 16, "priskv_use_mput_mget": True})
    assert made.l2_options == {"l2_cache_op_batch": "16", "priskv_use_mput_mget": "1"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"l1_capacity_gb": 0, "l2_backend": ""}, "missing_option"),
        ({"l2_backend": "ROCKDB"}, "unknown_connector"),
        ({"l2_options": {"rocksdb_rot": "/x"}}, "unknown_key"),
        ({"l2_options": {"block_size": 4}}, "unknown_key"),
        ({"l2_options": {"priskv_password": "hush"}}, "unknown_key"),
        ({"l2_backend": "ROCKSDB", "l2_options": {"rocksdb_root": "relative"}}, "bad_value"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        effective(**options)
    assert caught.value.details["reason"] == reason
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("connector", ["INFINISTORE", "PRIS", "PRISKV", "HPKV", "EIC"])
def test_a_connector_that_is_not_here_is_refused_by_name(connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F76: with what is missing, before anything is built."""
    monkeypatch.setattr(aibrix_options.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(aibrix_options, "RDMA_DEVICES", "/nowhere")
    with pytest.raises(BackendUnavailable) as caught:
        effective(l2_backend=connector.lower())
    assert caught.value.details["connector"] == connector
    assert connector in caught.value.message
    assert caught.value.details["missing"]


def test_infinistore_needs_rdma_or_tcp() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aibrix_options.importlib.util, "find_spec", lambda name: object())
        patch.setattr(aibrix_options, "RDMA_DEVICES", "/nowhere")
        with pytest.raises(BackendUnavailable) as caught:
            effective(l2_backend="INFINISTORE")
        assert caught.value.details["missing"] == ["an RDMA device"]
        effective(l2_backend="INFINISTORE", l2_options={"infinistore_connection_type": "tcp"})


def test_pages_that_vanish_are_said_and_l1_holds_some() -> None:
    """F49, and the vendor's ten minutes of RocksDB."""
    made = effective(l1_capacity_gb=0, l2_backend="ROCKSDB", l2_options={"rocksdb_root": "/x"})
    assert "600 seconds" in made.check(facts())[0]
    kept = effective(l1_capacity_gb=0, l2_backend="ROCKSDB", l2_options={"rocksdb_root": "/x", "rocksdb_ttl_s": 0})
    assert kept.check(facts()) == []
    with pytest.raises(InvalidConfig, match="whole number"):
        effective(l2_backend="ROCKSDB", l2_options={"rocksdb_ttl_s": "1h"}).check(facts())
    with pytest.raises(InvalidConfig):
        effective(l1_capacity_gb=1e-6).check(facts())
    with pytest.raises(InvalidConfig):
        effective(l1_capacity_gb=1).check(facts(page_bytes=1000))
    few, ends = effective(l1_capacity_gb=0.001).check(facts())
    assert "fewer than the host pool" in few
    assert "end with a detach" in ends


def test_a_store_of_one_process_is_not_shared() -> None:
    assert manifest_of(effective(l2_backend="SHFS"), {}).shared
    assert not manifest_of(effective(), {}).shared
    assert not manifest_of(effective(l2_backend="ROCKSDB"), {}).shared
    assert [manifest_of(effective(**one), {}).calls for one in ({}, {"l2_backend": "ROCKSDB"})] == [0, 1]
    assert manifest_of(effective(), {}).layouts == LAYOUTS


@pytest.mark.stores
def test_the_environment_stays_as_it_is() -> None:
    """Nothing of one attach reaches the process, another backend or another aibrix."""
    from aibrix_kvcache import envs

    from hicache_hooks.backends.aibrix_manager import vendor_settings

    before = dict(os.environ)
    settings = effective(l2_backend="SHFS", l2_options={"shfs_root": "/mine"}).settings()
    with vendor_settings(settings):
        assert envs.AIBRIX_KV_CACHE_OL_SHFS_ROOT == "/mine"
        assert envs.AIBRIX_KV_CACHE_OL_DOUBLE_GET_THRESHOLD == (1,)
        assert dict(os.environ) == before
    assert envs.AIBRIX_KV_CACHE_OL_SHFS_ROOT != "/mine"
    assert envs.os is os
    with pytest.raises(ZeroDivisionError), vendor_settings(settings):
        raise ZeroDivisionError
    assert envs.os is os


@pytest.mark.stores
def test_the_options_pass_the_attach_box() -> None:
    """Typed, unknown keys with the nearest name, no variable needed."""
    target = TargetState(backend="aibrix", extra_config=json.dumps({"l1_capacity_gb": 1, "l2_backend": ""}))
    assert box(env=ENV).validate(target, NOTHING).relation == "attach"
    with pytest.raises(InvalidConfig, match="l1_capacity_gb"):
        box(env=ENV).validate(TargetState(backend="aibrix", extra_config='{"l1_capacity": 1}'), NOTHING)
