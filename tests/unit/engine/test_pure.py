"""The engine side's pure parts: redaction, idle words, causes, goals, drift, usage, events."""

import time

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hicache_proto import api
from hicache_proto.errors import Inconsistent, InvalidRequest, PrepareFailed, RolledBack, UnsupportedByEngine
from hicache_proto.model import MANDATORY_COUNTERS, Blocker, EffectiveState, IdleReport, TargetState
from hicache_proto.secret_names import is_secret_name
from hicache_proto.transaction import CoordEvent, CoordPhase, See
from hicache_sidecar.core.redaction import (
    REDACTED,
    redact_config,
    redact_text,
    redact_value,
    scrub,
    secrets_in,
)
from hicache_sidecar.engine import causes, idle
from hicache_sidecar.engine.events import RING, EventHub
from hicache_sidecar.engine.goals import check_shape, goal_of
from hicache_sidecar.engine.settings import EngineSettings

QUIET = dict.fromkeys(MANDATORY_COUNTERS, 0)

# ---- redaction (F94)


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("password", True),
        ("redis_password", True),
        ("accessKey", True),
        ("access_key_id", True),
        ("SECRET", True),
        ("apiToken", True),
        ("hf_token", True),
        ("credentials", True),
        ("password_file", False),
        ("token_path", False),
        ("file_storage_path", False),
        ("prefetch_threshold", False),
        ("prefetch_timeout_per_ki_token", False),
        ("guard_deadline_s", False),
        ("token_ttl", False),
        ("sk", True),
        ("oss_ak", True),
        ("encryption_key", True),
        ("hicache_storage_pass_prefix_keys", False),
        ("pasword", True),
        ("secert", True),
        ("redis_passwrod", True),
        ("credentails", True),
        ("passed", False),
        ("private", False),
        ("section", False),
        ("tokenizer", False),
        ("max_tokens", False),
        ("key", False),
        ("", False),
    ],
)
def test_secret_keys(key, secret):
    """By whole words: ``token`` hides, ``tokenizer`` and ``max_tokens`` do not; a file's name is no secret.

    Misspelt as well (F94): the option is refused, and its value stood in the list of operations.
    """
    assert is_secret_name(key) is secret


def test_config_by_key_at_any_depth():
    """JSON is redacted by key; numbers as secrets too; everything else stays as it was."""
    text = '{"path": "/a", "auth": {"user": "u", "pw": 1}, "list": [{"secret_key": 12345}], "password_file": "/f"}'
    shown = redact_config(text)
    assert "12345" not in shown
    assert '"path": "/a"' in shown
    assert '"password_file": "/f"' in shown
    assert redact_config('{"path":  "/a"}') == '{"path":  "/a"}'
    assert redact_config("@/etc/hicache/x.json") == "@/etc/hicache/x.json"
    assert redact_config(None) is None


def test_malformed_config_by_pattern():
    """Text that does not parse is still redacted: an error must not echo it."""
    assert "hunter22" not in redact_config('{"password": "hunter22", oops')
    assert "hunter22" not in redact_text("could not log in: password=hunter22;")
    assert "hunter22" not in redact_text("redis://user:hunter22@host:6379/0 refused")


@given(st.text(min_size=6, max_size=40).filter(lambda s: s.strip() == s and REDACTED not in s))
def test_known_secrets_are_scrubbed_from_foreign_text(secret):
    """Whatever a vendor's exception quotes: the values of our own config do not come through."""
    import json

    config = json.dumps({"password": secret, "nested": {"api_key": secret}})
    assert secret in secrets_in(config)
    shown = scrub({"message": f"login with <{secret}> failed", "rows": [secret]}, secrets_in(config))
    assert secret not in shown["message"]
    assert shown["rows"] == [REDACTED]
    assert secret not in str(redact_value(json.loads(config)).values())


def test_booleans_and_empties_are_no_secrets():
    """``auth: true`` says that there is one; hiding it helps nobody."""
    assert redact_value({"auth": True, "password": "", "token": None}) == {"auth": True, "password": "", "token": None}


@pytest.mark.parametrize("text", ["a" * 400_000, "a://" * 100_000, '"' * 400_000, "a.b-" * 100_000, "a=" * 200_000])
def test_redaction_is_linear(text):
    """A hostile text must not hold the loop: a second for half a megabyte would be a denial of service."""
    started = time.process_time()
    redact_text(text)
    redact_config("{" + text)
    assert time.process_time() - started < 2.0


# ---- idle


@given(st.sampled_from([*MANDATORY_COUNTERS, "future_thing"]), st.integers(1, 1000))
def test_any_counter_blocks(name, count):
    """F2: any non-zero counter, known or not."""
    report = IdleReport(counters=QUIET | {name: count})
    assert not idle.is_idle(report)
    assert f"{name}={count} (rank 3)" in idle.not_idle("attach", {3: report}).message


@pytest.mark.parametrize("name", MANDATORY_COUNTERS)
def test_every_missing_counter_is_an_error(name):
    """F2: one missing mandatory counter is enough."""
    report = IdleReport(counters={k: v for k, v in QUIET.items() if k != name})
    assert not idle.is_idle(report)
    with pytest.raises(Inconsistent, match="incomplete idle report"):
        idle.check_complete({0: report})


def test_ages_are_told():
    """F3: the age of the oldest item, where the engine knows it."""
    report = IdleReport(counters=QUIET | {"waiting_queue": 2}, ages_ms={"waiting_queue": 1500})
    assert idle.not_idle("detach", {0: report}).details["blocked_by"] == [
        {"rank": 0, "name": "waiting_queue", "count": 2, "age_ms": 1500}
    ]


# ---- causes


def cause(phase, see, *, error=None, silent=(), blockers=(), drain=False, rank=-1, detail=""):
    event = CoordEvent(see, rank=rank, detail=detail)
    return causes.cause_of(phase, event, error, list(silent), list(blockers), verb="attach", drain=drain)


BUSY = [Blocker(rank=1, name="running_batch", count=2)]


@pytest.mark.parametrize(
    ("phase", "see", "options", "code"),
    [
        (CoordPhase.PREPARE, See.FAILED, {}, "prepare_failed"),
        (CoordPhase.PREPARE, See.LOST, {}, "prepare_failed"),
        (CoordPhase.PREPARE, See.TIMEOUT, {"silent": [3]}, "deadline_exceeded"),
        (CoordPhase.WAIT, See.TIMEOUT, {"blockers": BUSY}, "not_idle"),
        (CoordPhase.FREEZE, See.BUSY, {"blockers": BUSY}, "not_idle"),
        (CoordPhase.FREEZE, See.TIMEOUT, {"blockers": BUSY, "drain": True}, "deadline_exceeded"),
        (CoordPhase.FREEZE, See.LOST, {}, "rolled_back"),
        (CoordPhase.FREEZE, See.FAILED, {"error": UnsupportedByEngine("paused")}, "unsupported_by_engine"),
        (CoordPhase.COMMIT, See.FAILED, {}, "rolled_back"),
        (CoordPhase.COMMIT, See.DOUBT, {}, "rolled_back"),
        (CoordPhase.PREPARE, See.CANCEL, {}, "rolled_back"),
    ],
)
def test_every_end_has_its_code(phase, see, options, code):
    """The phase and the event decide the code; blockers are told wherever idle was the question."""
    error = cause(phase, see, **options)
    assert error.code == code
    if options.get("blockers"):
        assert error.details["blocked_by"] == [{"rank": 1, "name": "running_batch", "count": 2}]
    if options.get("silent"):
        assert "rank 3: no reply" in error.message


def test_a_rank_that_said_why_it_cannot_begin_is_not_called_silent():
    """An older builder that still runs is asked again until time is up; its rank did reply."""
    event = CoordEvent(See.TIMEOUT)
    told = {1: "the builder of operation 3 has not ended yet"}
    error = causes.cause_of(CoordPhase.PREPARE, event, None, [0, 1], [], verb="attach", drain=False, told=told)
    assert error.details["reason"] == "prepare_late"
    assert "rank 0: no reply; rank 1: the builder of operation 3 has not ended yet" in error.message


def test_the_ranks_reason_comes_through():
    """details.reason of the rank's own error is what the client reads."""
    error = PrepareFailed("x", details={"reason": "canary_mismatch"})
    told = cause(CoordPhase.PREPARE, See.FAILED, error=error, rank=2, detail="rank 2: x")
    assert (told.details["reason"], told.details["rank"]) == ("canary_mismatch", 2)


def test_not_restored_is_never_rolled_back():
    """F30: a compensation that failed has another code, and names the ranks."""
    told = causes.not_restored(RolledBack("x"), {1: "not restored"})
    assert (told.code, told.details["rolled_back"]) == ("inconsistent", False)
    assert "rank 1" in told.message


# ---- goals

NOW = EffectiveState(prefetch_policy="best_effort", write_policy="write_through")
FILE = EffectiveState(backend="file", prefetch_policy="best_effort", write_policy="write_through")
DESIRED = TargetState("file", '{"password": "x"}', {"prefetch_threshold": 8}, "best_effort", "write_through")


def test_attach_fills_a_whole_state():
    """What is not said is what runs now; a config that is not said stays, with its secrets."""
    goal = goal_of(api.AttachRequest(hicache_storage_backend="file"), None, NOW)
    assert goal.target == TargetState("file", None, {}, "best_effort", "write_through")
    kept = goal_of(api.AttachRequest(hicache_storage_backend="file", hicache_write_policy="write_back"), DESIRED, FILE)
    assert kept.target.extra_config == DESIRED.extra_config
    assert kept.target.knobs == DESIRED.knobs
    assert kept.target.write_policy == "write_back"
    other = goal_of(api.AttachRequest(hicache_storage_backend="mem"), DESIRED, FILE)
    assert other.target.extra_config is None
    assert other.target.knobs == {}


def test_policy_keeps_everything_else():
    """A policy request changes what it names."""
    goal = goal_of(api.PolicyRequest(knobs={"prefetch_threshold": 4}), DESIRED, FILE)
    assert goal.target.extra_config == DESIRED.extra_config
    assert goal.target.knobs == {"prefetch_threshold": 4}
    with pytest.raises(InvalidRequest):
        goal_of(api.PolicyRequest(knobs={"prefetch_threshold": 4}), None, NOW)


def test_drain_has_a_default_wait():
    """interface.md: drain with 0 means 30."""
    assert goal_of(api.DetachRequest(mode="drain"), None, NOW).wait_s == 30
    assert goal_of(api.DetachRequest(), None, NOW).wait_s == 0


@pytest.mark.parametrize(
    "request_",
    [
        api.PolicyRequest(),
        api.PolicyRequest(knobs={"colour": 1}),
        api.PolicyRequest(knobs={"prefetch_timeout_base": float("nan")}),
        api.AttachRequest(hicache_storage_backend=""),
        api.DetachRequest(mode="hard"),
    ],
    ids=lambda r: type(r).__name__,
)
def test_bad_shapes(request_):
    """Refused with the field's name."""
    with pytest.raises(InvalidRequest) as refused:
        check_shape(request_)
    assert "field" in refused.value.details


@pytest.mark.parametrize(
    "values",
    [{"freeze_s": 20.0}, {"liveness_s": 0.5}, {"on_engine_restart": "maybe"}, {"in_doubt_s": 0.5, "freeze_s": 0.1}],
    ids=str,
)
def test_settings_check_themselves(values):
    """Leases in the wrong order would break the transaction's rules."""
    with pytest.raises(ValueError):
        EngineSettings(**values)


# ---- events


async def test_slow_follower_gets_a_snapshot(autojump_clock):
    """One that fell behind the ring is told so by a fresh snapshot; nobody ever slows the publisher."""
    hub = EventHub(first_id=1)
    stream = hub.follow(lambda: {"n": hub.last_id})
    assert (await anext(stream)).kind == "snapshot"
    for number in range(RING + 10):
        hub.publish("tick", number=number)
    behind = await anext(stream)
    assert (behind.kind, behind.id) == ("snapshot", RING + 10)
    hub.publish("tick")
    assert (await anext(stream)).id == RING + 11
    with trio.move_on_after(60) as scope:
        await anext(stream)
    assert scope.cancelled_caught
