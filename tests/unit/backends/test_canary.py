"""The canary: each kind of lying store is caught before anything depends on it, and nothing is left in it."""

import threading
from pathlib import Path

import pytest
from tests.rigs.backends import BK, Fault, NoBatchGetBK, RememberingBK, Rig

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.backends.canary import Scratch, run_canary
from hicache_hooks.backends.file import FileOptions, FileStore
from hicache_hooks.backends.probe import StoreProbe
from hicache_hooks.cache.pages import PageFormat
from hicache_proto.errors import PrepareFailed

FORMAT = PageFormat(8000, "ns")
CONTEXT = StoreContext(namespace="ns", page_bytes=FORMAT.page_bytes, layout="page_first")


def backend() -> BK:
    made = BK({}, CONTEXT)
    made.open()
    return made


def reason(made: BK) -> str:
    with pytest.raises(PrepareFailed) as caught:
        run_canary(made, FORMAT, Scratch(FORMAT.page_bytes))
    assert caught.value.status == 502
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value.details["reason"])


def test_a_good_store_passes_and_is_left_empty(rig: Rig) -> None:
    scratch = Scratch(FORMAT.page_bytes)
    run_canary(backend(), FORMAT, scratch)
    run_canary(backend(), FORMAT, scratch)
    assert rig.data == {}
    assert rig.calls["batch_exists"] == 6, "two look-ups after the write (F67)"


@pytest.mark.parametrize("answer", ["none", "all"])
def test_a_look_up_that_is_answered_from_memory_is_made_at_the_store_too(rig: Rig, answer: str) -> None:
    """F67: what the store remembers of its own put shows nothing about its look-up."""
    made = RememberingBK({}, CONTEXT)
    made.open()
    run_canary(made, FORMAT, Scratch(FORMAT.page_bytes))
    rig.faults["batch_exists"] = Fault(answer=answer)
    assert reason(made) == "canary_exists_mismatch"


@pytest.mark.parametrize("answer", ["none", "all"])
def test_the_guards_own_probe_asks_the_store_too(rig: Rig, answer: str) -> None:
    """F79: the same of a store in use."""
    made = RememberingBK({}, CONTEXT)
    made.open()
    probe = StoreProbe(made, FORMAT, Scratch(FORMAT.page_bytes))
    assert probe.read(put=True)
    assert probe.read(put=False)
    rig.faults["batch_exists"] = Fault(answer=answer)
    assert probe.read(put=True) == (answer == "all")
    assert probe.read(put=False) == (answer == "none")


def test_the_file_store_passes(tmp_path: Path) -> None:
    store = FileStore(FileOptions(file_storage_path=str(tmp_path)).effective({}), CONTEXT)
    store.open()
    run_canary(store, FORMAT, Scratch(FORMAT.page_bytes))
    assert [p for p in (tmp_path / "pages").rglob("*") if p.is_file()] == []
    assert store.health()["used_bytes"] == 0
    store.close()


@pytest.mark.parametrize(
    ("method", "fault", "expected"),
    [
        ("batch_put", Fault(answer="none"), "canary_write_failed"),
        ("batch_put", Fault(error=OSError), "canary_write_failed"),
        ("batch_put", Fault(error=SystemExit), "canary_write_failed"),
        ("batch_put", Fault(answer="shape"), "backend_contract"),
        ("batch_put", Fault(error=NotImplementedError), "backend_contract"),
        ("batch_exists", Fault(answer="none"), "canary_exists_mismatch"),
        ("batch_exists", Fault(answer="all"), "canary_exists_mismatch"),
        ("batch_exists", Fault(error=RuntimeError), "canary_exists_mismatch"),
        ("batch_exists", Fault(answer="none", every=3), "canary_exists_mismatch"),
        ("batch_get", Fault(answer="bytes"), "canary_mismatch"),
        ("batch_get", Fault(answer="short"), "canary_mismatch"),
        ("batch_get", Fault(answer="all"), "canary_mismatch"),
        ("batch_get", Fault(answer="none"), "canary_read_failed"),
        ("batch_get", Fault(answer="shape"), "backend_contract"),
        ("batch_get", Fault(error=TimeoutError), "canary_read_failed"),
    ],
)
def test_each_lie_has_its_reason(rig: Rig, method: str, fault: Fault, expected: str) -> None:
    """F15 ``canary_mismatch``, F67 ``canary_exists_mismatch``; the keys are deleted whatever happened."""
    rig.faults[method] = fault
    assert reason(backend()) == expected
    assert rig.data == {}


def test_missing_methods_are_found_on_the_instance_too(rig: Rig) -> None:
    """F15."""
    made = NoBatchGetBK({}, CONTEXT)
    with pytest.raises(PrepareFailed) as caught:
        run_canary(made, FORMAT, Scratch(FORMAT.page_bytes))
    assert caught.value.details == {"reason": "backend_contract", "missing": ["batch_get"]}
    assert rig.calls["batch_put"] == 0


def test_a_delete_that_fails_hides_nothing(rig: Rig) -> None:
    rig.faults["delete"] = Fault(error=SystemExit)
    run_canary(backend(), FORMAT, Scratch(FORMAT.page_bytes))
    rig.faults["batch_get"] = Fault(answer="bytes")
    assert reason(backend()) == "canary_mismatch"


def test_a_full_store_says_so_in_the_refusal(tmp_path: Path) -> None:
    """F62 at attach: the store's own words go with the refusal."""
    options = FileOptions(file_storage_path=str(tmp_path), min_free_space="1pb").effective({})
    store = FileStore(options, CONTEXT)
    store.open()
    with pytest.raises(PrepareFailed) as caught:
        run_canary(store, FORMAT, Scratch(FORMAT.page_bytes))
    assert caught.value.details["reason"] == "canary_write_failed"
    assert caught.value.details["health"]["no_space"].startswith("no_space")
    store.close()


def test_cancel_stops_between_steps(rig: Rig) -> None:
    with pytest.raises(PrepareFailed) as caught:
        run_canary(backend(), FORMAT, Scratch(FORMAT.page_bytes), cancelled=lambda: rig.calls["batch_put"] > 0)
    assert caught.value.details["reason"] == "cancelled"
    assert rig.calls["batch_get"] == 0
    assert rig.data == {}


def test_ranks_do_not_meet(rig: Rig) -> None:
    """Several ranks probe one shared store at once."""
    failed: list[BaseException] = []

    def probe() -> None:
        try:
            for _ in range(20):
                run_canary(backend(), FORMAT, Scratch(FORMAT.page_bytes))
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert rig.data == {}


def test_secrets_in_exceptions_stay_inside(rig: Rig) -> None:
    """F94: a failing backend that puts a secret into its exception."""
    rig.faults["batch_put"] = Fault(error=OSError, text="s3cr3t-SENTINEL")
    with pytest.raises(PrepareFailed) as caught:
        run_canary(backend(), FORMAT, Scratch(FORMAT.page_bytes))
    assert "SENTINEL" not in caught.value.message + repr(caught.value.details)
