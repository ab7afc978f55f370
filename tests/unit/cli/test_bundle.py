"""``hicachectl bundle``: one new file of its owner's, with what failed named, and without a secret."""

import json
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.fake_sidecar import Peer

from hicache_proto import api, control, errors
from hicache_sidecar.cli import bundle
from hicache_sidecar.cli.main import main

LAST_EVENT = 12


@pytest.fixture(autouse=True)
def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine that runs the tests."""
    monkeypatch.setattr(bundle, "_journal", lambda unit: {"unit": unit, "lines": ["started"]})


def answer(peer: Peer, request: control.Request) -> None:
    body = request.body
    if isinstance(body, api.WatchRequest):
        if body.last_event_id is None:
            peer.progress(request, id=LAST_EVENT, kind="snapshot", data={"oldest_event_id": 11})
        else:
            assert body.last_event_id == 10
            for i in range(11, LAST_EVENT + 2):  # one that came meanwhile
                peer.progress(request, id=i, kind="operation", data={"token": "hush"})
    elif isinstance(body, api.HistoryRequest):
        peer.error(request, errors.Forbidden("not for you"))
    else:
        peer.result(request, {"of": type(body).__name__, "deep": [{"password": "hush", "password_file": "/etc/p"}]})


def test_everything_is_in_it_and_no_secret(ctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    ran = ctl("bundle", str(path), answer=answer)
    assert ran.code == 0
    assert ran.out.startswith(f"{path}: ")
    assert ran.err == "not in it: history: not for you\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert "hush" not in text
    made = json.loads(text)
    assert made["failed"] == {"history": "not for you"}
    assert made["status"] == {"of": "StatusRequest", "deep": [{"password": "***", "password_file": "/etc/p"}]}
    assert set(made) == {
        "format", "made_at", "failed", "sidecar", "status", "idle", "ranks", "backends", "failover", "operations",
        "events", "host", "journal",
    }  # fmt: skip
    assert [(event["id"], event["kind"]) for event in made["events"]] == [
        (12, "snapshot"), (11, "operation"), (12, "operation"),
    ]  # fmt: skip
    assert made["host"]["packages"]["msgspec"]
    assert made["journal"]["lines"] == ["started"]


def test_without_a_sidecar_the_rest_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.json"
    assert main(["--socket", str(tmp_path / "absent"), "-o", "json", "bundle", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["path"] == str(path)
    assert shown["bytes"] == path.stat().st_size
    asked = {"sidecar", "status", "idle", "ranks", "backends", "failover", "operations", "history", "events"}
    assert set(shown["failed"]) == asked
    assert json.loads(path.read_text())["host"]["python"]


def test_a_sidecar_that_goes_away_leaves_what_came_before(ctl: Any, tmp_path: Path) -> None:
    def leaves(peer: Peer, request: control.Request) -> None:
        if isinstance(request.body, api.RanksRequest):
            peer.drop()
        else:
            answer(peer, request)

    path = tmp_path / "b.json"
    assert ctl("bundle", str(path), answer=leaves).code == 0
    made = json.loads(path.read_text())
    assert {"status", "idle"} <= set(made)
    assert {"ranks", "history", "events"} <= set(made["failed"])


def test_a_sidecar_that_ends_the_stream_has_no_events(ctl: Any, tmp_path: Path) -> None:
    """It is stopping: an answer instead of a snapshot."""
    path = tmp_path / "b.json"
    ran = ctl("bundle", str(path), answer=lambda peer, request: peer.result(request, {}))
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(path.read_text())["events"] == []


def test_a_file_that_is_there_is_left_alone(ctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text("mine")
    ran = ctl("bundle", str(path), answer=answer)
    assert (ran.code, path.read_text()) == (2, "mine")
    assert ran.err == f"hicachectl: bundle: {path} is there already\n"
    assert ctl("bundle", str(tmp_path / "none" / "b.json"), answer=answer).code == 2


def test_what_cannot_be_written_whole_is_not_there(ctl: Any, tmp_path: Path) -> None:
    """As with a full disk."""
    path = tmp_path / "b.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        ran = ctl("bundle", str(path), answer=answer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (ran.code, path.exists()) == (2, False)
    assert ran.err == f"hicachectl: bundle: cannot write {path}: File too large\n"


def test_the_journal_of_a_host_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bundle._journal("x.service") == {"error": "no journalctl here"}
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\n[ "$2" = there.service ] && echo line || { echo no such unit >&2; exit 1; }\n')
    program.chmod(0o755)
    assert bundle._journal("there.service") == {"unit": "there.service", "lines": ["line"]}
    assert bundle._journal("x.service") == {"error": "journalctl exited with 1: no such unit"}
