"""The version floor, and the entry point that must never keep an engine from starting."""

from types import SimpleNamespace

import pytest

from hicache_hooks.sglang import ours, plugin, pull, versions
from hicache_hooks.sglang.world import HookCommand
from hicache_hooks.world import WorldCommand, encode


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.20.post1", (0, 5, 20)),
        ("1.0.0rc2", (1, 0, 0)),
        ("0.0.0.dev1+g1", None),
        ("", None),
    ],
)
def test_versions_are_read(text: str, parsed: tuple[int, int, int] | None) -> None:
    assert versions.parse_version(text) == parsed


@pytest.mark.parametrize("old", ["0.5.19", "0.5.14.post2", "0.4.99"])
def test_an_old_engine_is_refused_by_name(old: str) -> None:
    assert old in versions.too_old(old)
    assert "0.5.20" in versions.too_old(old)


@pytest.mark.parametrize("new", ["0.5.20", "0.5.23", "0.6.0", "0.0.0.dev1", ""])
def test_others_are_left_to_the_probe(new: str) -> None:
    assert versions.too_old(new) == ""


def test_without_a_sidecar_nothing_happens() -> None:
    environ: dict[str, str] = {}
    plugin.entry(environ)
    plugin.entry({plugin.ENV: " "})
    assert environ == {}


def test_a_failure_never_reaches_the_engine(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(plugin, "_register", broken)
    plugin.entry({plugin.ENV: "ipc:///x"})
    assert "serves without a sidecar" in caplog.text
    monkeypatch.undo()
    plugin._scheduler_made(object(), "ipc:///x", "e", "i")
    assert "this scheduler has no hook" in caplog.text
    assert pull.on_pull(["x"]) is None


def test_a_scheduler_without_its_hook_lets_commands_pass() -> None:
    """The leader of its world may broadcast one; the engine's dispatcher raises for a type that it does not know."""
    scheduler = SimpleNamespace(_request_dispatcher=SimpleNamespace(_mapping={}))
    plugin._scheduler_made(scheduler, "ipc:///x", "e", "i")
    handler = scheduler._request_dispatcher._mapping[HookCommand]
    assert handler(HookCommand(encode(WorldCommand("undo", 7)))) is None
    assert handler(HookCommand(b"no command")) is None


def test_ours_marks_this_thread_and_nests() -> None:
    assert not ours.is_ours()
    with ours.ours():
        with ours.ours():
            assert ours.is_ours()
        assert ours.is_ours()
    assert not ours.is_ours()
