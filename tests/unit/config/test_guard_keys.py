"""The guard's settings in the extra config: live keys beside the prefetch knobs, which the backend never sees."""

import json

import pytest

from hicache_hooks.cache.config import Running, compare, resolve
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.guard_settings import GUARD_KNOBS, GuardSettings
from hicache_proto.errors import InvalidConfig
from hicache_proto.model import TargetState
from hicache_proto.secret_names import is_secret_name

NOTHING = Running(None, Knobs())


def target(**config: object) -> TargetState:
    return TargetState(backend="file", extra_config=json.dumps({"file_storage_path": "/x", **config}))


def resolved(current: Running = NOTHING, **config: object) -> Running:
    return resolve(target(**config), current, namespace="ns", env={})


def test_they_are_taken_out_before_the_backend_sees_its_options() -> None:
    running = resolved(guard_deadline_s=2, guard_min_calls=3)
    assert running.knobs.guard == GuardSettings(deadline_s=2.0, min_calls=3)
    assert running.config is not None
    assert not set(running.config.option_values()) & set(GUARD_KNOBS)


def test_other_settings_are_a_live_change() -> None:
    """Same backend, same options: nothing is rebuilt, and the answer names what changed."""
    first = resolved(guard_deadline_s=2)
    difference = compare(first, resolved(first, guard_deadline_s=3, guard_hold_s=1, prefetch_threshold=64))
    assert difference.relation == "live"
    assert difference.changed_keys == ["guard_deadline_s", "guard_hold_s", "prefetch_threshold"]
    assert compare(first, resolved(first, guard_deadline_s=2.0)).relation == "same"


def test_a_policy_update_without_a_config_keeps_them() -> None:
    first = resolved(guard_deadline_s=2)
    policy = TargetState(backend="file", prefetch_policy="wait_complete")
    assert resolve(policy, first, namespace="ns", env={}).knobs.guard.deadline_s == 2.0


def test_a_new_config_starts_from_the_defaults() -> None:
    first = resolved(guard_deadline_s=2)
    assert resolved(first).knobs.guard == GuardSettings()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"guard_deadline_s": 0}, "bad_knob"),
        ({"guard_deadline_s": "s3cr3t"}, "bad_knob"),
        ({"guard_min_calls": 2.5}, "bad_knob"),
        ({"guard_deadlines": 1}, "unknown_key"),
    ],
)
def test_wrong_ones_are_refused_without_their_value(config: dict[str, object], reason: str) -> None:
    """F53, F94; an unknown one names the nearest."""
    with pytest.raises(InvalidConfig) as caught:
        resolved(**config)
    assert caught.value.details["reason"] == reason
    assert "s3cr3t" not in caught.value.message
    if reason == "unknown_key":
        assert caught.value.details["suggestion"] == "guard_deadline_s"


def test_their_names_are_no_secrets() -> None:
    assert not any(is_secret_name(key) for key in GUARD_KNOBS)
