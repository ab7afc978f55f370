"""Backend eic over a FAKE of its client: it was never run against the service. What is shown is our side alone."""

import importlib.util
import json
import mmap
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.eic import SPEC, EicStore
from hicache_hooks.backends.eic_client import EicFailed, load
from hicache_hooks.backends.eic_options import CONFIG_ENV, EicConfig, EicOptions
from hicache_hooks.backends.options import StoreFacts
from hicache_proto.errors import InvalidConfig, PrepareFailed

FAKE = Path(__file__).resolve().parents[2] / "rigs" / "eic_fake" / "eic.py"
PAGE = 8192
CONFIG = EicConfig(remote_url="eic://10.0.0.1:9000", eic_instance_id="i-1")
YAML = "remote_url: eic://10.0.0.2:9000\neic_instance_id: i-2\neic_namespace: from-yaml\neic_kv_ttl: 60\n"


class Service:
    """The fake's module and directory."""

    def __init__(self, root: Path, module: Any) -> None:
        self.root, self.module = root, module
        self.options: list[Any] = []

    def faults(self, **faults: Any) -> None:
        path = self.root / "faults.json"
        path.unlink(missing_ok=True)
        if faults:
            path.write_text(json.dumps(faults))

    def store(self, **options: Any) -> EicStore:
        """An open store whose pool is registered."""
        made = EicOptions(**{"config": CONFIG, "namespace": "space", **options}).effective({})
        store = EicStore(made, StoreContext(namespace="ns", page_bytes=PAGE, layout="page_first"))
        store.open()
        return store


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    spec = importlib.util.spec_from_file_location("eic", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "eic", module)
    monkeypatch.setenv("EIC_FAKE_ROOT", str(tmp_path))
    return Service(tmp_path, module)


def memory(count: int = 4) -> memoryview:
    return memoryview(mmap.mmap(-1, count * PAGE))


def split(pool: memoryview) -> list[memoryview]:
    return [pool[i : i + PAGE] for i in range(0, pool.nbytes, PAGE)]


def test_pages_go_from_and_to_registered_memory_and_a_hole_is_a_miss(service: Service) -> None:
    """The fake refuses memory that is said to be registered and is not."""
    store, pool = service.store(), memory()
    store.register(pool)
    store.register(pool)
    pages = split(pool)
    for i, page in enumerate(pages):
        page[:] = bytes([i + 1]) * PAGE
    assert store.batch_put(["a", "b"], pages[:2]) == [True, True]
    assert store.batch_get(["a", "x", "b"], pages[1:]) == ["hit", "miss", "hit"]
    assert [page[0] for page in pages] == [1, 1, pages[2][0], 2]
    other = split(memory(1))  # outside the pool: said to be so
    assert store.batch_get(["b"], other) == ["hit"]
    assert other[0][-1] == 2
    assert store.batch_exists(["b", "x"]) == [True, False]
    assert store.health()["registered_bytes"] == 4 * PAGE


def test_a_short_object_is_a_miss(service: Service) -> None:
    """The client says SUCCESS and leaves a stale tail, which may be the right page's of an earlier read."""
    store, pages = service.store(), split(memory(1))
    pages[0][:] = b"\7" * PAGE
    store.batch_put(["a"], pages)
    (path,) = (service.root / "ns-space").iterdir()
    path.write_bytes(path.read_bytes()[: PAGE // 2])
    assert store.batch_get(["a"], pages) == ["miss"]


def test_namespace_and_lifetime_reach_the_client(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = service.module.Client.mset
    monkeypatch.setattr(service.module.Client, "mset", lambda c, k, v, o: (seen.append(o), real(c, k, v, o))[1])
    store = service.store(namespace="mine", ttl_second=30)
    store.batch_put(["a"], split(memory(1)))
    assert [(option.ns, option.ttl_second) for option in seen] == [("mine", 30)]
    assert service.store(namespace="other").batch_exists(["a"]) == [False]


@pytest.mark.parametrize("status", ["PARTIAL_FAILED", "FAILED", "SUCCESS"])
def test_absence_is_learnt_from_the_service_whatever_its_batch_status(service: Service, status: str) -> None:
    """Nobody outside knows the code of a key that is not there: a miss must not look like an outage."""
    service.faults(all_missing=status)
    store, pages = service.store(), split(memory(2))
    assert store.batch_get(["x", "y"], pages) == ["miss", "miss"]
    assert store.batch_exists(["x"]) == [False]


def test_an_outage_is_no_miss(service: Service) -> None:
    """F91: else no breaker would ever open."""
    store, pages = service.store(), split(memory(3))
    store.batch_put(["a", "b", "c"], pages)
    service.faults(fail_every=3)
    results = store.batch_get(["a", "b", "c"], pages)
    assert sorted(results) == ["error", "hit", "hit"]
    assert sorted(map(str, store.batch_put(["a", "b", "c"], pages))) == ["None", "True", "True"]  # F69
    service.faults(down=True)
    assert store.batch_get(["a", "b", "c"], pages) == ["error"] * 3
    for call in (lambda: store.batch_exists(["a"]), lambda: store.batch_put(["d"], pages[:1]), store.health):
        with pytest.raises(EicFailed):
            call()
    service.faults(down=True, no_codes=True)
    with pytest.raises(EicFailed, match="0 codes for 3 keys"):
        store.batch_get(["a", "b", "c"], pages)
    service.faults()
    assert store.batch_get(["a"], pages[:1]) == ["hit"]


@pytest.mark.parametrize(("faults", "word"), [({"init": 7}, "code 7"), ({"finds_all": True}, "nobody stored"),
                                              ({"down": True, "no_codes": True}, "status")])  # fmt: skip
def test_a_service_that_makes_no_sense_is_refused_in_prepare(
    service: Service, faults: dict[str, Any], word: str
) -> None:
    service.faults(**faults)
    with pytest.raises(EicFailed, match=word):
        service.store()


def test_a_refused_registration_is_an_error_and_leaves_no_claim(service: Service) -> None:
    store, pool = service.store(), memory(1)
    service.faults(register=False)
    with pytest.raises(EicFailed, match="register"):
        store.register(pool)
    service.faults()
    assert store.batch_put(["a"], split(pool)) == [True]  # as memory that is not registered


def test_delete_set_aside_and_clear(service: Service) -> None:
    store, pages = service.store(), split(memory(3))
    store.batch_put(["a", "b", "c"], pages)
    assert store.delete(["a", "a", "x"]) == 1
    store.set_aside("b", "checksum")
    assert store.batch_exists(["a", "b", "c"]) == [False, False, True]
    with pytest.raises(PrepareFailed) as refused:
        store.clear()
    assert refused.value.details["reason"] == "clear_unsupported"


def test_calls_after_close_raise(service: Service) -> None:
    store = service.store()
    store.close()
    store.close()
    for call in (lambda: store.batch_exists(["a"]), lambda: store.batch_get(["a"], split(memory(1))), store.health):
        with pytest.raises(RuntimeError, match="not open"):
            call()


# ---- options


def test_the_config_comes_from_the_option_then_a_file_then_the_variable(tmp_path: Path) -> None:
    (tmp_path / "eic.yaml").write_text(YAML)
    env = {CONFIG_ENV: str(tmp_path / "eic.yaml"), "HICACHE_CONFIG_DIRS": str(tmp_path)}
    by_variable = EicOptions().effective(env)
    assert (by_variable.namespace, by_variable.ttl_second) == ("from-yaml", 60)
    assert EicOptions(config=str(tmp_path / "eic.yaml"), ttl_second=5).effective(env).ttl_second == 5
    inline = EicOptions(config=CONFIG).effective(env)
    assert (inline.config, inline.namespace, inline.ttl_second) == (CONFIG, "", -1)
    assert by_variable.effective(env) == by_variable


@pytest.mark.parametrize(
    ("options", "env", "word"),
    [
        ({}, {}, "must be given"),
        ({"config": "/etc/shadow"}, {}, "outside the allowed"),
        ({"config": EicConfig(eic_instance_id="i")}, {}, "remote_url"),
        ({"config": EicConfig(remote_url="eic://h:1")}, {}, "eic_instance_id"),
        ({"config": EicConfig(remote_url="eic://h:1", eic_instance_id="i", eic_log_dir="log")}, {}, "absolute"),
        ({"config": CONFIG, "ttl_second": 0}, {}, "at least 1"),
        ({}, {CONFIG_ENV: "/no/such/file"}, "cannot be read"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], env: dict[str, str], word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        EicOptions(**options).effective(env)


def test_a_yaml_with_an_unknown_key_or_a_wrong_type_names_it_and_no_value(tmp_path: Path) -> None:
    """F94: errors give the place, not the content."""
    env = {CONFIG_ENV: str(tmp_path / "eic.yaml")}
    for line, name in (("remote_ulr: hush-hush", "remote_ulr"), ("eic_log_level: hush-hush", "eic_log_level")):
        (tmp_path / "eic.yaml").write_text(YAML + line + "\n")
        with pytest.raises(InvalidConfig) as wrong:
            EicOptions().effective(env)
        assert name in wrong.value.message
        assert "hush" not in wrong.value.message


def test_what_does_nothing_here_is_said() -> None:
    facts = StoreFacts(layout="page_first", page_bytes=PAGE, l2_pages=8)
    assert EicOptions(config=CONFIG).effective({}).check(facts) == []
    gpu = EicConfig(remote_url="eic://h:1", eic_instance_id="i", enable_kvset_gpu_direct=True)
    assert "GPU direct" in EicOptions(config=gpu).effective({}).check(facts)[0]


def test_a_missing_client_is_named_and_another_package_of_that_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eic", None)
    assert "Elastic Instant Cache" in SPEC.missing()[0]
    monkeypatch.setitem(sys.modules, "eic", types.ModuleType("eic"))
    assert SPEC.missing()
    with pytest.raises(ImportError, match="another one"):
        load()


def test_pages_before_a_batch_that_failed_count(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """F80."""
    monkeypatch.setattr("hicache_hooks.backends.eic.MAX_BATCH", 2)
    store = service.store()
    pages = split(memory(3))
    store.batch_put(["a", "b", "c"], pages)
    real = store._client.get

    def get(keys: list[str], parts: Any) -> list[bool | None]:
        if "c" in keys:
            raise EicFailed("planted")
        return real(keys, parts)

    monkeypatch.setattr(store._client, "get", get)
    assert store.batch_get(["a", "b", "c"], pages) == ["hit", "hit", "error"]
    with pytest.raises(EicFailed):
        store.batch_get(["c"], pages[2:])
