"""Every command against a real sidecar and a real dp=2 engine, each as a process of its own: exit codes and effect."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rigs.procs import Engine, Processes, Sidecar, http_json

from hicache_sidecar.client import Client, ConnectionLost


class Host:
    """A sidecar, an engine, and hicachectl."""

    def __init__(self, sidecar: Sidecar, engine: Engine, store: Path) -> None:
        self.sidecar, self.engine = sidecar, engine
        self.config = json.dumps({"file_storage_path": str(store), "prefetch_threshold": 64})
        self.other = json.dumps({"file_storage_path": str(store) + "-2"})

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hicache_sidecar.cli.main", *words],
            env=os.environ | {"HICACHE_SIDECAR_SOCKET": self.sidecar.socket},
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def ctl(self, *words: str, code: int = 0) -> Any:
        """The JSON document of a command that must exit with ``code``."""
        ran = self.run("-o", "json", *words)
        assert ran.returncode == code, (words, ran.returncode, ran.stdout, ran.stderr)
        return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("cli")
    with Processes(root) as processes:
        sidecar = processes.sidecar()
        engine = processes.engine(sidecar, "--dp", "2", "--l1-tokens", "2048", "--l2-tokens", "4096")
        yield Host(sidecar, engine, root / "store")


@pytest.fixture
def detached(host: Host) -> Iterator[Host]:
    host.ctl("detach", "--wait", "10")
    yield host
    host.run("resume")
    host.run("bypass", "off")
    host.ctl("detach", "--wait", "10")


@pytest.fixture
def attached(detached: Host) -> Host:
    detached.ctl("attach", "file", "--config", detached.config, "--wait", "10")
    return detached


def test_reads(attached: Host) -> None:
    status = attached.ctl("status", "--fresh")
    assert [rank["hicache_storage_backend"] for rank in status["ranks"]] == ["file", "file"]
    assert attached.ctl("idle")["idle"] is True
    assert len(attached.ctl("ranks")["ranks"]) == 2
    assert {"file", "dynamic"} <= {backend["name"] for backend in attached.ctl("backends")["backends"]}
    for words in (["status"], ["idle", "--all"], ["ranks"], ["backends", "file"], ["history"], ["operations"]):
        ran = attached.run(*words)
        assert ran.returncode == 0, ran.stderr
        assert "Traceback" not in ran.stderr
        assert len(ran.stdout.splitlines()) > 2


def test_a_bundle_of_a_live_host(attached: Host, tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    assert set(attached.ctl("bundle", str(path))["failed"]) <= {"journal"}
    made = json.loads(path.read_text())
    assert made["status"]["hicache_storage_backend"] == "file"
    assert made["idle"]["idle"] is True
    assert made["history"]["revisions"][-1]["kind"] == "attach"
    snapshot, *events = made["events"]
    ids = [event["id"] for event in events]
    assert (ids[0], ids[-1]) == (snapshot["data"]["oldest_event_id"], snapshot["id"])
    assert any(event["kind"] == "operation" for event in events)


def test_attach_again_swap_and_detach(detached: Host) -> None:
    first = detached.ctl("attach", "file", "--config", detached.config, "--wait", "10", "--request-id", "once")
    assert first["changed"] is True
    again = detached.ctl("attach", "file", "--config", detached.config, "--wait", "10", "--request-id", "once")
    fixed = ("operation_id", "revision", "changed", "changed_keys", "success", "state")
    assert {key: again[key] for key in fixed} == {key: first[key] for key in fixed}  # a repeat gets the first answer
    assert detached.ctl("attach", "file", "--config", detached.config)["changed"] is False
    refused = detached.ctl("attach", "file", "--config", detached.other, code=7)
    assert refused["error"]["code"] == "already_attached"
    assert detached.ctl("check", "file", "--config", detached.other, "--wait", "10")["dry_run"] is True
    assert detached.ctl("swap", "file", "--config", detached.other, "--wait", "10")["changed"] is True
    assert detached.ctl("detach", "--wait", "10")["changed"] is True
    assert detached.ctl("detach")["changed"] is False


def test_config_from_a_file(detached: Host, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(detached.config)
    assert detached.ctl("attach", "file", "--config", f"@{file}", "--wait", "10")["success"] is True
    outside = detached.ctl("swap", "file", "--config", f"@@{file}", code=1)
    assert outside["error"]["code"] == "invalid_config"  # outside of the engine's HICACHE_CONFIG_DIRS


def test_refusals_have_their_exit_codes(attached: Host) -> None:
    mismatch = attached.ctl("detach", "--if-revision", "99999", code=7)
    assert mismatch["error"]["code"] == "revision_mismatch"
    assert attached.ctl("swap", "nothing", code=1)["error"]["code"] == "unknown_backend"
    assert attached.ctl("swap", "file", "--config", "{bad", code=1)["error"]["code"] == "invalid_config"
    assert attached.ctl("clear", "--confirm", "x", code=1)["error"]["code"] == "invalid_request"
    assert attached.ctl("operations", "op-none", code=1)["error"]["code"] == "not_found"
    assert attached.ctl("cancel", "op-none", code=1)["error"]["code"] == "not_found"
    assert attached.ctl("rollback", "99999", code=1)["error"]["code"] == "not_found"


def test_policies_bypass_and_drain(attached: Host) -> None:
    changed = attached.ctl("policy", "--write-policy", "write_back", "--prefetch-threshold", "32", "--wait", "10")
    assert set(changed["changed_keys"]) == {"hicache_write_policy", "prefetch_threshold"}
    assert attached.ctl("bypass", "on")["bypass"] is True
    assert attached.ctl("status")["state"] == "bypassed"
    assert attached.ctl("bypass", "off")["bypass"] is False
    assert attached.ctl("drain", "--timeout", "10", "--hold", "60")["success"] is True
    assert attached.ctl("status")["state"] == "draining"
    assert attached.ctl("resume")["success"] is True
    assert attached.ctl("status")["state"] == "attached"
    attached.ctl("policy", "--write-policy", "write_through", "--prefetch-threshold", "64", "--wait", "10")


def test_failover_policies(attached: Host) -> None:
    """Set, seen, checked on the ranks, removed; over the socket and over HTTP."""
    shown = attached.ctl("failover", "set", "file", "bypass", "--confirm", "5", "--backoff", "10")
    assert (shown["state"], shown["policies"]["file"]["confirm_s"]) == ("watching", 5.0)
    spare = f"file={attached.other}"
    shown = attached.ctl("failover", "set", "*", "spares", "--spare", spare, "--reconnect", "on")
    assert sorted(shown["policies"]) == ["*", "file"]
    bad = attached.ctl("failover", "set", "nixl", "spares", "--spare", 'file={"file_storage_pat": "/x"}', code=1)
    assert bad["error"]["code"] == "invalid_config"
    assert "spare 0 of 'nixl'" in bad["error"]["message"]
    code, over_http = http_json("GET", f"{attached.sidecar.url}/hicache/failover")
    assert (code, sorted(over_http["policies"])) == (200, ["*", "file"])
    code, over_http = http_json("PUT", f"{attached.sidecar.url}/hicache/failover", {"policies": {}})
    assert (code, over_http["policies"], over_http["state"]) == (200, {}, "off")
    assert attached.ctl("failover", "release")["policies"] == {}
    code, refused = http_json(
        "PUT", f"{attached.sidecar.url}/hicache/failover", {"policies": {"file": {"action": "?"}}}
    )
    assert (code, refused["error"]["code"]) == (422, "invalid_request")
    ran = attached.run("failover")
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False)


def test_history_and_rollback(attached: Host) -> None:
    revision = attached.ctl("status")["revision"]
    attached.ctl("detach", "--wait", "10", "--reason", "to come back")
    rows = attached.ctl("history")["revisions"]
    assert rows[-1]["reason"] == "to come back"
    assert attached.ctl("rollback", str(revision), "--wait", "10")["state"] == "attached"
    assert attached.ctl("resolve", "reapply")["success"] is True


def test_clear_deletes_what_was_stored(attached: Host) -> None:
    attached.engine.generate("a prompt that reaches the store " * 10, dp_rank=0)
    with Client.connect(attached.sidecar.socket) as client:
        names = {rank.namespace for rank in client.status(fresh=True).ranks}
    assert len(names) == 1
    assert attached.run("clear").returncode == 2
    assert attached.ctl("clear", "--confirm", names.pop())["success"] is True


def test_watch_starts_with_a_snapshot_and_sees_changes(detached: Host) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-m", "hicache_sidecar.cli.main", "--socket", detached.sidecar.socket, "-o", "json", "watch"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watcher.stdout is not None
        snapshot = json.loads(watcher.stdout.readline())
        assert snapshot["kind"] == "snapshot"
        detached.ctl("attach", "file", "--config", detached.config, "--wait", "10")
        after = json.loads(watcher.stdout.readline())
        assert after["id"] > snapshot["id"]
    finally:
        watcher.kill()
        watcher.communicate(timeout=10)


def test_a_busy_engine_is_exit_3_and_wait_gets_through(detached: Host) -> None:
    from hicache_sidecar.cli.demo_stage import Background

    busy = Background(lambda: detached.engine.generate("busy", tokens=600, dp_rank=1))
    while detached.run("idle").returncode != 3:
        assert busy.running
    refused = detached.ctl("attach", "file", "--config", detached.config, code=3)
    assert refused["error"]["retryable"] is True
    assert {(b["rank"], b["name"]) for b in refused["error"]["details"]["blocked_by"]} >= {(1, "running_batch")}
    assert detached.ctl("attach", "file", "--config", detached.config, "--wait", "60")["success"] is True
    busy.wait(60)


def test_a_sidecar_that_dies_and_an_engine_that_leaves(tmp_path: Path) -> None:
    """Exit codes 5 and 6; the client says at once that the connection is gone."""
    with Processes(tmp_path) as processes:
        sidecar = processes.sidecar()
        host = Host(sidecar, Engine(sidecar.process, 0), tmp_path)
        assert host.ctl("status", code=6)["state"] == "engine_down"
        assert host.ctl("attach", "file", "--config", host.config, code=6)["error"]["code"] == "no_engine"
        with Client.connect(sidecar.socket) as client:
            sidecar.process.kill()
            with pytest.raises(ConnectionLost):
                client.status()
        assert host.ctl("status", code=5)["error"]["code"] == "unreachable"
