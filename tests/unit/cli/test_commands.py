"""hicachectl against a scripted sidecar: what each command sends, prints and exits with."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.fake_sidecar import DONE, Peer

from hicache_proto import api, control, errors
from hicache_sidecar.cli.commands import COMMANDS
from hicache_sidecar.cli.main import main

CHANGE = {
    "mode": "drain",
    "wait_timeout_s": 5.0,
    "timeout_s": 60.0,
    "reason": "why",
    "if_revision": 4,
    "request_id": "key-1",
}
CHANGE_FLAGS = [
    "--mode",
    "drain",
    "--wait",
    "5",
    "--timeout",
    "60",
    "--if-revision",
    "4",
    "--request-id",
    "key-1",
    "--reason",
    "why",
]
POLICIES = {"hicache_storage_prefetch_policy": "timeout", "hicache_write_policy": "write_back"}
POLICY_FLAGS = ["--prefetch-policy", "timeout", "--write-policy", "write_back"]

SENT = {
    "status": (["status"], api.StatusRequest()),
    "status fresh": (["status", "--fresh"], api.StatusRequest(fresh=True)),
    "idle": (["idle"], api.IdleRequest()),
    "ranks": (["ranks"], api.RanksRequest()),
    "backends": (["backends"], api.BackendsRequest()),
    "attach": (
        ["attach", "file", "--config", '{"a": 1}', *POLICY_FLAGS, *CHANGE_FLAGS],
        api.AttachRequest(
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config_json='{"a": 1}',
            **POLICIES,
            **CHANGE,
        ),
    ),
    "attach plain": (["attach", "file"], api.AttachRequest(hicache_storage_backend="file")),
    "swap": (["swap", "nixl"], api.AttachRequest(hicache_storage_backend="nixl", swap=True)),
    "check": (["check", "nixl"], api.AttachRequest(hicache_storage_backend="nixl", swap=True, dry_run=True)),
    "detach": (["detach", *CHANGE_FLAGS], api.DetachRequest(**CHANGE)),
    "policy": (["policy", *POLICY_FLAGS, *CHANGE_FLAGS], api.PolicyRequest(**POLICIES, **CHANGE)),
    "policy knobs": (
        [
            "policy",
            "--prefetch-threshold",
            "64",
            "--prefetch-timeout-base",
            "0.5",
            "--prefetch-timeout-per-ki-token",
            "0.1",
            "--prefetch-timeout-max",
            "none",
            "--hicache-storage-pass-prefix-keys",
            "true",
        ],
        api.PolicyRequest(
            knobs={
                "prefetch_threshold": 64,
                "prefetch_timeout_base": 0.5,
                "prefetch_timeout_per_ki_token": 0.1,
                "prefetch_timeout_max": None,
                "hicache_storage_pass_prefix_keys": True,
            }
        ),
    ),
    "clear": (["clear", "--confirm", "ns", "--timeout", "7"], api.ClearRequest(confirm="ns", timeout_s=7.0)),
    "bypass": (["bypass", "on"], api.BypassRequest(enabled=True)),
    "bypass off": (["bypass", "off"], api.BypassRequest(enabled=False)),
    "resolve": (["resolve", "adopt", "--reason", "why"], api.ResolveRequest(how="adopt", reason="why")),
    "drain": (
        ["drain", "--timeout", "3", "--hold", "9", "--reason", "why"],
        api.DrainRequest(timeout_s=3.0, hold_s=9.0, reason="why"),
    ),
    "resume": (["resume"], api.ResumeRequest()),
    "operations": (["operations"], api.OperationsRequest()),
    "operation": (["operations", "op-1"], api.OperationsRequest(operation_id="op-1")),
    "cancel": (["cancel", "op-1"], api.CancelRequest(operation_id="op-1")),
    "history": (["history"], api.HistoryRequest()),
    "rollback": (["rollback", "3", *CHANGE_FLAGS], api.RollbackRequest(revision=3, **CHANGE)),
    "watch": (["watch", "--after", "8"], api.WatchRequest(last_event_id=8)),
}


@pytest.mark.parametrize("case", SENT)
def test_what_a_command_sends(ctl: Any, case: str) -> None:
    """Decoded by the sidecar's own decoder: a field name that the API does not know would be refused."""
    argv, expected = SENT[case]
    ran = ctl("-o", "json", *argv, answer={"idle": True, "ranks": [{}], "success": True})
    assert ran.bodies == [expected]
    assert ran.code == 0, ran.err


def test_every_command_of_the_table_is_tested_and_loads() -> None:
    named = {argv[0] for argv, _ in SENT.values()}
    assert set(COMMANDS) - named == {"failover", "bundle", "demo", "completion"}
    for name, command in COMMANDS.items():
        assert callable(command.load(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_describes_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"hicachectl {name}" in capsys.readouterr().out


@pytest.mark.parametrize("code", errors.ERRORS)
def test_an_error_prints_the_http_document_and_exits_by_the_table(ctl: Any, code: str) -> None:
    error = errors.ERRORS[code]("this went wrong", details={"reason": "because"}, operation_id="op-1")
    ran = ctl("-o", "json", "attach", "file", answer=error)
    assert ran.code == error.exit_code
    assert ran.json == {
        "error": {
            "code": code,
            "message": "this went wrong",
            "retryable": error.retryable,
            "hint": error.hint,
            "operation_id": "op-1",
            "details": {"reason": "because"},
        }
    }
    assert ran.err == ""
    ran = ctl("attach", "file", answer=error)
    assert (ran.code, ran.out) == (error.exit_code, "")
    assert "this went wrong" in ran.err
    assert error.hint in ran.err


def test_a_busy_engine_names_every_blocker(ctl: Any) -> None:
    """Issue: a refusal while busy, with its blockers."""
    blocked = [
        {"rank": 0, "name": "running_batch", "count": 1},
        {"rank": 1, "name": "grammar_queue", "count": 3},
        {"rank": 1, "name": "future_thing", "count": 1},
    ]
    busy = errors.NotIdle("Reject attach: scheduler is not idle. #queue-req=3 #running-req=1",
                          details={"blocked_by": blocked})  # fmt: skip
    ran = ctl("attach", "file", answer=busy)
    assert ran.code == 3
    assert "#queue-req=3 #running-req=1" in ran.err
    assert "rank 0: running_batch=1; rank 1: grammar_queue=3, future_thing=1" in ran.err


def test_answers_print_as_text(ctl: Any) -> None:
    ran = ctl("attach", "file")
    assert ran.code == 0
    assert "rank 0: done; rank 1: done" in ran.out
    assert "revision 5 · state attached · operation op-5 · changed prefetch_threshold" in ran.out
    assert ctl("-q", "attach", "file").out == ""
    assert ctl("attach", "file", "-q").out == ""


def test_a_partly_failed_answer_exits_1_even_when_quiet(ctl: Any) -> None:
    ran = ctl("-q", "bypass", "on", answer={"success": False, "message": "rank 1: no reply", "ranks": []})
    assert ran.code == 1


def test_json_is_the_document_unchanged(ctl: Any) -> None:
    for argv in (["-o", "json", "attach", "file"], ["attach", "file", "-o", "json"], ["-ojson", "attach", "file"]):
        assert ctl(*argv).json == DONE


STATUS: dict[str, Any] = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"file_storage_path": "/srv"}',
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_write_policy": "write_through",
    "revision": 12,
    "state": "attached",
    "desired": None,
    "drift": [{"rank": 1, "field": "hicache_write_policy", "desired": "write_back", "reported": "write_through"}],
    "usage": {"get": {"hit": 5, "miss": 10}},
    "ranks": [
        {
            "rank": rank, "dp_rank": rank, "pp_rank": 0, "tp_rank": 0, "pid": 100 + rank, "epoch": 1,
            "state": "attached",
            "hicache_storage_backend": "file", "revision": 12, "bypass": False, "report_age_ms": 90 + 50 * rank,
        }
        for rank in range(2)
    ],
    "missing_ranks": [],
}  # fmt: skip


def test_status_prints_aligned_tables(ctl: Any) -> None:
    ran = ctl("status", answer=STATUS)
    assert ran.code == 0
    assert "state            attached" in ran.out
    assert '{"file_storage_path": "/srv"}' in ran.out
    rows = [line for line in ran.out.splitlines() if line.startswith(("RANK", "   0", "   1"))]
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1  # numbers to the right: all rows end in the same column
    assert "GET" not in ran.out
    assert "drift: rank 1 hicache_write_policy" in ran.err


def test_status_has_a_line_per_store(ctl: Any) -> None:
    """F57, F91: read, missed (not found, or found and not delivered), failed, bytes, and whether it was ever read."""
    stores = {
        "file": {"lookups": 4, "skipped": {}, "write_only": False, "ops": {
            "exists": {"hit": 70, "miss": 30, "error": 1}, "get": {"hit": 65, "miss": 5, "timeout": 2, "bytes": 650},
            "put": {"hit": 9, "bytes": 90}}},
        "redis:r": {"lookups": 100, "skipped": {}, "write_only": True, "ops": {"put": {"hit": 1, "bytes": 10}}},
    }  # fmt: skip
    guard = {"breaker": "half_open"}
    ranks = [rank | {"guard": guard} for rank in STATUS["ranks"]]
    ran = ctl("status", answer=STATUS | {"usage_by_backend": stores, "ranks": ranks})
    rows = [line.split() for line in ran.out.splitlines() if line.startswith(("STORE", "file", "redis:r"))]
    assert rows == [
        ["STORE", "REQUESTS", "PAGES_READ", "MISSED", "FAILED", "READ_BYTES", "WRITTEN_BYTES", "BREAKER", "NEVER_READ"],
        ["file", "4", "65", "35", "3", "650", "90", "half_open", "no"],
        ["redis:r", "100", "0", "0", "0", "0", "10", "-", "yes"],
    ]


def test_status_says_what_the_store_says_of_itself(ctl: Any) -> None:
    """F65, F75: the connector, and direct I/O or why not."""
    facts = {"path": "/srv", "direct_io": False, "direct_io_reason": "tmpfs"}
    one, two = ({**rank, "inner": "POSIX aio", "store": facts} for rank in STATUS["ranks"])
    line = "store            POSIX aio, path /srv, direct_io no, direct_io_reason tmpfs"
    assert line in ctl("status", answer=STATUS | {"ranks": [one, two]}).out
    other = two | {"store": {"path": "/other"}}
    assert "rank 0: POSIX aio, path /srv" in ctl("status", answer=STATUS | {"ranks": [one, other]}).out
    assert "\nstore " not in ctl("status", answer=STATUS).out


def test_status_without_an_engine_prints_and_exits_6(ctl: Any) -> None:
    down = STATUS | {"state": "engine_down", "ranks": [], "usage": {}, "drift": []}
    ran = ctl("status", answer=down)
    assert ran.code == 6
    assert "engine_down" in ran.out
    ran = ctl("-o", "json", "status", answer=STATUS | {"missing_ranks": [3]})
    assert ran.code == 6
    assert ran.json["missing_ranks"] == [3]


def test_idle_exits_3_when_something_blocks(ctl: Any) -> None:
    report = {
        "idle": False,
        "blocked_by": [{"rank": 0, "name": "future_thing", "count": 2}],
        "ranks": [{"rank": 0, "idle": False, "counters": {"future_thing": 2, "waiting_queue": 0}, "report_age_ms": 1}],
    }
    ran = ctl("idle", answer=report)
    assert ran.code == 3
    assert "future_thing" in ran.out
    assert "waiting_queue" not in ran.out
    assert "waiting_queue" in ctl("idle", "--all", answer=report).out


def test_backends_shows_one_with_its_options(ctl: Any) -> None:
    listed: dict[str, Any] = {"backends": [
        {"name": "file", "available": True, "missing": [], "layouts": ["page_first"],
         "options_schema": {"properties": {"max_size": {"type": "integer", "description": "byte quota"}}}},
        {"name": "nixl", "available": False, "missing": ["package nixl (extra nixl)"], "layouts": [],
         "options_schema": {}},
    ]}  # fmt: skip
    ran = ctl("backends", answer=listed)
    assert "package nixl (extra nixl)" in ran.out
    assert "max_size" not in ran.out
    assert "byte quota" in ctl("backends", "file", answer=listed).out
    schema: Any = listed["backends"][0]["options_schema"]
    schema["required"] = ["max_size"]
    schema["properties"]["direct"] = {"anyOf": [{"type": "boolean"}, {"enum": ["0", "1"]}], "default": False}
    rows = [line.split() for line in ctl("backends", "file", answer=listed).out.splitlines()]
    assert ["max_size", "integer", "(required)", "byte", "quota"] in rows
    assert ["direct", "boolean|string", "no", "-"] in rows
    schema["properties"]["scheme"] = {"anyOf": [{"enum": ["http", "https"]}, {"type": "null"}], "default": None}
    schema["properties"]["inner"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Inner"}], "default": None}
    schema["$defs"] = {"Inner": {"properties": {"level": {"type": "integer", "default": 2, "description": "loud"}}}}
    rows = [line.split() for line in ctl("backends", "file", answer=listed).out.splitlines()]
    assert ["scheme", "http|https|null", "-", "-"] in rows
    at = rows.index(["inner", "string|object", "-", "-"])
    assert rows[at + 1] == ["inner.level", "integer", "2", "loud"]
    listed["backends"][0]["manifest"] = {"alignment": 32, "shared": False, "parallel_axes": ["tp", "pp"]}
    rows = [line.split() for line in ctl("backends", "file", answer=listed).out.splitlines()]
    assert [row for row in rows if row and row[0] in ("alignment", "shared", "parallel")] == [
        ["alignment", "32"],
        ["shared", "no"],
        ["parallel", "axes", "tp,pp"],
    ]
    assert ctl("backends", "nothing", answer=listed).code == 1


def test_clear_without_confirmation_only_names_the_namespace(ctl: Any) -> None:
    ran = ctl("clear", answer=STATUS | {"ranks": [{"namespace": "ab12"}, {"namespace": "ab12"}]})
    assert ran.code == 2
    assert "--confirm ab12" in ran.err
    assert [type(body) for body in ran.bodies] == [api.StatusRequest]


def test_drain_that_ran_out_exits_4(ctl: Any) -> None:
    assert ctl("drain", answer=errors.DeadlineExceeded("still draining")).code == 4
    assert ctl("drain", answer={"success": False, "state": "draining", "message": "still draining"}).code == 4


def test_watch_prints_one_document_per_line(ctl: Any) -> None:
    def events(peer: Peer, request: control.Request) -> None:
        for number in (1, 2, 3):
            peer.progress(request, id=number, kind="state", at="now", data={"state": "attached", "ranks": []})

    ran = ctl("-o", "json", "watch", "--count", "2", answer=events)
    assert [json.loads(line)["id"] for line in ran.out.splitlines()] == [1, 2]
    assert ctl("watch", "--count", "1", answer=events).out == "1  now  state  state=attached\n"


def test_connection_lost_prints_the_operation_and_exits_5(ctl: Any) -> None:
    """interface.md: then the operation id is printed with "outcome unknown", at once."""

    def lose(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-44", phase="commit")
        peer.drop()

    ran = ctl("attach", "file", answer=lose)
    assert (ran.code, ran.out) == (5, "")
    assert "operation op-44: outcome unknown" in ran.err
    ran = ctl("-o", "json", "attach", "file", answer=lose)
    assert ran.code == 5
    assert ran.json["error"]["code"] == "connection_lost"
    assert ran.json["error"]["operation_id"] == "op-44"
    assert "op-44: outcome unknown" in ran.err


def test_text_of_others_moves_no_cursor_and_forges_no_line(ctl: Any) -> None:
    """F108's kind, on a terminal: a reason with a newline or an escape sequence is printed as what it is."""
    row = {"revision": 1, "operation_id": "op-1", "kind": "attach", "result": "committed", "actor": "eve", "at": "now",
           "reason": "a\nb\x1b[2Jc"}  # fmt: skip
    ran = ctl("history", answer=lambda peer, request: peer.result(request, {"revisions": [row]}))
    assert ran.out.splitlines()[1].endswith("a\\nb\\x1b[2Jc")

    def refuse(peer: Peer, request: control.Request) -> None:
        peer.error(request, errors.InvalidConfig("no\x1b[2J"))

    assert ctl("detach", answer=refuse).err == "hicachectl: no\\x1b[2J [invalid_config]\n"


@pytest.mark.parametrize(
    "arguments", [["detach", "--reason", "\udcff"], ["rollback", "9" * 30], ["detach", "--if-revision", "9" * 30]]
)
def test_what_no_message_can_hold_is_refused_in_words(ctl: Any, arguments: list[str]) -> None:
    """Bytes of a command line that are no text, and numbers over 64 bits."""
    ran = ctl(*arguments, answer=lambda peer, request: peer.result(request, DONE))
    assert ran.code == 1
    assert ran.err.startswith("hicachectl: the request cannot be written: ")


@pytest.mark.parametrize("command", ["status", "watch", "history", "idle", "operations", "failover"])
def test_a_lost_connection_leaves_no_outcome_in_doubt_where_nothing_was_asked_for(ctl: Any, command: str) -> None:
    ran = ctl(command, answer=lambda peer, request: peer.drop())
    assert (ran.code, ran.out) == (5, "")
    assert ran.err == "hicachectl: the sidecar closed the connection [connection_lost]\n"


def test_no_sidecar_exits_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_SIDECAR_SOCKET", str(tmp_path / "absent"))
    assert main(["-o", "json", "status"]) == 5
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unreachable"


def test_progress_is_written_only_to_a_terminal(ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def busy(peer: Peer, request: control.Request) -> None:
        peer.progress(request, operation_id="op-1", phase="freeze", blocked_by=[{"rank": 0, "name": "x", "count": 1}])
        peer.result(request, DONE)

    assert ctl("detach", answer=busy).err == ""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _self: True, raising=False)
    ran = ctl("detach", answer=busy)
    assert "op-1 · freeze · waiting for rank 0: x=1" in ran.err
    assert ran.err.endswith("\r\x1b[K")
    assert ctl("-q", "detach", answer=busy).err == ""
