"""``hicachectl failover``: what it sends, what it prints, what it refuses by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_proto.failover import FailoverPolicy, FailoverRequest, SetFailoverRequest, Spare

DOCUMENT = {
    "policies": {
        "file": {
            "action": "spares", "reconnect": None, "mode": "auto", "confirm_s": 2.0, "min_stay_s": 30.0,
            "flap_limit": 6, "spares": [{"hicache_storage_backend": "redis"}],
        }
    },
    "state": "on_spare",
    "reason": "rank 0: breaker open (read: hung)",
    "backend": "redis",
    "home": {"hicache_storage_backend": "file"},
    "next_try_in_s": 4.25,
    "steps": [{"at": "now", "step": "spare", "reason": "hung", "backend": "file", "to": "redis"}],
    "warnings": ["not all ranks are connected: the spares were not checked"],
}  # fmt: skip
BYPASS = FailoverPolicy(action="bypass", confirm_s=1.0, min_stay_s=2.0, steady_s=3.0, backoff_s=4.0, backoff_max_s=5.0,
                        flap_window_s=6.0, wait_s=7.0, timeout_s=8.0, flap_limit=9, reconnect=False, mode="drain",
                        watch="reads_and_writes")  # fmt: skip
FLAGS = ["--confirm", "1", "--min-stay", "2", "--steady", "3", "--backoff", "4", "--backoff-max", "5", "--flap-window",
         "6", "--wait", "7", "--timeout", "8", "--flap-limit", "9", "--reconnect", "off", "--mode", "drain", "--watch",
         "reads_and_writes"]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], FailoverRequest()),
        (["show"], FailoverRequest()),
        (["release", "--reason", "checked"], SetFailoverRequest(release=True, reason="checked")),
        (["unset", "*"], SetFailoverRequest(policies={"*": None}, keep_others=True)),
        (["set", "file", "bypass", *FLAGS], SetFailoverRequest(policies={"file": BYPASS}, keep_others=True)),
        (
            ["set", "file", "spares", "--spare", 'redis={"url": "a=b"}', "--spare", "mooncake"],
            SetFailoverRequest(
                policies={
                    "file": FailoverPolicy(
                        action="spares",
                        spares=[
                            Spare(
                                hicache_storage_backend="redis",
                                hicache_storage_backend_extra_config_json='{"url": "a=b"}',
                            ),
                            Spare(hicache_storage_backend="mooncake"),
                        ],
                    )
                },
                keep_others=True,
            ),
        ),
        (
            ["set", "--policies", '{"file": {"action": "detach"}}'],
            SetFailoverRequest(policies={"file": FailoverPolicy(action="detach")}),
        ),
    ],
)
def test_what_it_sends(ctl: Any, argv: list[str], expected: object) -> None:
    """Decoded by the sidecar's own decoder."""
    ran = ctl("-o", "json", "failover", *argv, answer=DOCUMENT)
    assert (ran.code, ran.bodies, ran.json) == (0, [expected], DOCUMENT)


def test_files_are_read_here_and_paths_of_the_engines_host_are_sent(ctl: Any, tmp_path: Path) -> None:
    (tmp_path / "spare.json").write_text('{"url": "redis://h"}')
    ran = ctl("failover", "set", "file", "spares", "--spare", f"redis=@{tmp_path}/spare.json",
              "--spare", "nixl=@@/etc/hicache/nixl.toml", answer=DOCUMENT)  # fmt: skip
    spares = ran.bodies[0].policies["file"].spares
    assert [s.hicache_storage_backend_extra_config_json for s in spares] == [
        '{"url": "redis://h"}', "@/etc/hicache/nixl.toml",
    ]  # fmt: skip


def test_what_it_prints(ctl: Any) -> None:
    ran = ctl("failover", answer=DOCUMENT)
    for text in ("on_spare", "breaker open (read: hung)", "next try in  4.2 s", "redis", "file     spare"):
        assert text in ran.out.replace("now   ", "").replace("spare  file", "file     spare"), ran.out
    assert "not checked" in ran.err
    assert "no policies" not in ran.out
    assert "no policies: a store that fails stays attached" in ctl("failover", answer={"state": "off"}).out


@pytest.mark.parametrize(
    "argv",
    [["set"], ["set", "file"], ["unset"], ["set", "file", "explode"], ["set", "file", "spares", "--spare", "=x"],
     ["set", "--policies", "[1]"], ["set", "--policies", "{"], ["set", "file", "--policies", "{}"],
     ["show", "--confirm", "nan"]],
)  # fmt: skip
def test_wrong_command_lines_are_usage_errors_and_send_nothing(ctl: Any, argv: list[str]) -> None:
    ran = ctl("-o", "json", "failover", *argv, answer=DOCUMENT)
    assert (ran.code, ran.bodies) == (2, [])
    assert json.loads(ran.out)["error"]["code"] == "usage"
