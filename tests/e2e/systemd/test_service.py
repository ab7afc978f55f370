"""The shipped units under a real systemd: activation, readiness, watchdog, stop, instances, credentials."""

import json

import pytest
from tests.e2e.systemd.conftest import Rig

pytestmark = pytest.mark.needs_systemd

SERVICE, SOCKET = "hicache-sidecar.service", "hicache-sidecar.socket"
PATH = "/run/hicache-sidecar/control.sock"


@pytest.fixture(autouse=True)
def stopped(rig: Rig) -> None:
    """Each test starts from stopped units without left-over drop-ins."""
    rig.run("systemctl", "stop", SERVICE, SOCKET, check=False)
    rig.run("rm", "-f", f"/etc/systemd/system/{SERVICE}.d/test.conf")
    rig.run("systemctl", "reset-failed", check=False)
    rig.run("systemctl", "daemon-reload")


def test_first_command_starts_the_daemon(rig: Rig) -> None:
    """F107: the socket unit owns the path; the daemon takes it and leaves it."""
    rig.run("systemctl", "start", SOCKET)
    assert rig.run("stat", "-c", "%a %U %G", PATH).strip() == "660 root hicache"
    assert rig.show("ActiveState") == "inactive"
    assert rig.control() == "engine_down"
    assert rig.show("ActiveState") == "active"
    assert rig.show("NRestarts") == "0"
    assert rig.run("stat", "-c", "%a %U %G", "/run/hicache-sidecar/hooks.sock").strip() == "660 hicache-sidecar hicache"
    assert rig.run("stat", "-c", "%a %U", "/var/lib/hicache-sidecar").strip() == "700 hicache-sidecar"
    rig.run("systemctl", "stop", SERVICE)
    assert rig.show("Result") == "success"
    assert rig.control() == "engine_down"  # the path is still there, and starts it again
    assert rig.show("ActiveState") == "active"


def test_start_returns_when_ready_with_a_status_line(rig: Rig) -> None:
    rig.run("systemctl", "start", SERVICE)
    assert rig.control() == "engine_down"
    rig.until("status text", lambda: "ranks 0/0" in rig.show("StatusText"))
    assert "\n" not in rig.show("StatusText")
    assert json.loads(rig.run("curl", "-fsS", "http://127.0.0.1:30080/healthz"))["ok"] is True
    metrics = rig.run("curl", "-fsS", "http://127.0.0.1:30080/metrics")
    assert "hicache_state 8.0" in metrics


def test_strangers_get_nothing(rig: Rig) -> None:
    """F96 under the shipped modes: outside the group the path is out of reach; inside it [access] decides."""
    rig.run("systemctl", "start", SERVICE)
    assert rig.control() == "engine_down"
    assert rig.control(user="nobody") == ""


def test_watchdog_kills_a_blocked_loop_and_it_comes_back(rig: Rig) -> None:
    """F108: the loop stands still (fault point), pings stop, systemd restarts it; a queued request is answered."""
    rig.write(
        f"/etc/systemd/system/{SERVICE}.d/test.conf",
        "[Service]\nWatchdogSec=2\nEnvironment=HICACHE_SIDECAR_FAULTS=loop.block\n",
    )
    rig.run("systemctl", "daemon-reload")
    rig.run("systemctl", "start", SOCKET, SERVICE)
    first = rig.show("MainPID")
    rig.run("kill", "-USR2", first)
    rig.until("restart", lambda: rig.show("NRestarts") == "1" and rig.show("ActiveState") == "active")
    assert rig.show("MainPID") != first
    assert "Watchdog timeout" in rig.journal()
    assert rig.control() == "engine_down"


def test_killed_daemon_is_restarted(rig: Rig) -> None:
    rig.run("systemctl", "start", SOCKET, SERVICE)
    rig.run("kill", "-KILL", rig.show("MainPID"))
    rig.until("restart", lambda: rig.show("NRestarts") == "1" and rig.show("ActiveState") == "active")
    assert rig.control() == "engine_down"


def test_wrong_configuration_fails_at_once_and_is_not_repeated(rig: Rig) -> None:
    rig.write(f"/etc/systemd/system/{SERVICE}.d/test.conf", "[Service]\nEnvironment=HICACHE_SIDECAR_HTPT=x\n")
    rig.run("systemctl", "daemon-reload")
    rig.run("systemctl", "start", SERVICE, check=False)
    rig.until("failure", lambda: rig.show("ActiveState") == "failed")
    assert rig.show("NRestarts") == "0"
    assert "HICACHE_SIDECAR_HTPT is no setting" in rig.journal()


def test_reload_keeps_the_process(rig: Rig) -> None:
    rig.run("systemctl", "start", SERVICE)
    pid = rig.show("MainPID")
    rig.run("systemctl", "reload", SERVICE)
    rig.until("reload", lambda: "reload: access" in rig.journal())
    assert rig.show("MainPID") == pid
    assert rig.show("ActiveState") == "active"


def test_journal_has_priorities_and_a_name(rig: Rig) -> None:
    rig.run("systemctl", "start", SERVICE)
    lines = [json.loads(line) for line in rig.journal(SERVICE, "-o", "json").splitlines()]
    ours = [entry for entry in lines if "control socket:" in str(entry.get("MESSAGE"))]
    assert ours
    assert {entry["PRIORITY"] for entry in ours} == {"6"}
    assert {entry["SYSLOG_IDENTIFIER"] for entry in ours} == {"hicache-sidecar"}
    assert not any(str(entry["MESSAGE"]).startswith("<6>") for entry in ours)


def test_token_as_a_credential(rig: Rig) -> None:
    rig.write("/etc/hicache-sidecar/http-token", "credential-token-0123456789\n", "600")
    rig.write(
        f"/etc/systemd/system/{SERVICE}.d/test.conf",
        "[Service]\nLoadCredential=http-token:/etc/hicache-sidecar/http-token\n",
    )
    rig.run("systemctl", "daemon-reload")
    rig.run("systemctl", "start", SERVICE)
    url, code = (
        "http://127.0.0.1:30080/hicache/storage-backend",
        ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}"),
    )
    assert rig.run(*code, url) == "401"
    assert rig.run(*code, "-H", "Authorization: Bearer credential-token-0123456789", url) == "200"


def test_instances_stand_side_by_side(rig: Rig) -> None:
    paths = []
    for name, port in (("llm0", 30081), ("llm1", 30082)):
        rig.write(
            f"/etc/hicache-sidecar/{name}.toml", f'engine_id = "{name}"\n[http]\nlisten = "127.0.0.1:{port}"\n', "644"
        )
        rig.run("systemctl", "start", f"hicache-sidecar@{name}.socket", f"hicache-sidecar@{name}.service")
        paths.append(f"/run/hicache-sidecar/{name}/control.sock")
        answer = json.loads(rig.run("curl", "-fsS", f"http://127.0.0.1:{port}/hicache/storage-backend"))
        assert answer["engine_id"] == name
    assert [rig.control(path) for path in paths] == ["engine_down"] * 2
    rig.run("systemctl", "stop", "hicache-sidecar@llm0.service", "hicache-sidecar@llm1.service")
    assert rig.show("Result", "hicache-sidecar@llm0.service") == "success"


def test_a_damaged_journal_is_recovered_as_the_readme_says(rig: Rig) -> None:
    """Its command runs as the daemon's user outside the unit: that user reads the configuration by its group, and owns
    what the stopped units left. The program itself lies out of its reach here, so a shell does what it would do."""
    rig.run("systemctl", "start", SOCKET, SERVICE)
    rig.run("systemctl", "stop", SOCKET, SERVICE)
    as_daemon = ("runuser", "-u", "hicache-sidecar", "--")
    assert "hicache" in rig.run(*as_daemon, "id", "-nG").split()
    rig.run(*as_daemon, "test", "-r", "/etc/hicache-sidecar/sidecar.toml")
    for folder in ("/run/hicache-sidecar", "/var/lib/hicache-sidecar"):
        rig.run(*as_daemon, "test", "-w", folder)
    rig.run(*as_daemon, "test", "-w", "/var/lib/hicache-sidecar/journal")
    rig.run(*as_daemon, "rm", "-f", PATH)  # a stale socket is replaced
    rig.run("systemctl", "start", SOCKET, SERVICE)
    assert rig.control() == "engine_down"
