"""Target states resolved for SGLang: names, knobs, secrets, and what is the same config."""

import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from hicache_hooks.cache.config import Running, compare
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.sglang import adapter
from hicache_hooks.sglang.config import BASE, EngineConfig, adopted, engine_text, resolve
from hicache_proto.errors import (
    BackendUnavailable,
    Forbidden,
    HicacheError,
    InvalidConfig,
    UnknownBackend,
    UnsupportedByEngine,
)
from hicache_proto.model import TargetState

NAMESPACE = "0" * 32
KNOWN = ["dynamic", "file", "mooncake"]
NOTHING = Running(None, Knobs(prefetch_policy="timeout"))


def resolved(target: TargetState, current: Running = NOTHING, **env: str) -> Running:
    return resolve(target, current, namespace=NAMESPACE, known=KNOWN, env=env)


def file(**values: Any) -> TargetState:
    return TargetState(backend="file", extra_config=json.dumps(values))


def test_options_and_knobs_are_told_apart() -> None:
    running = resolved(file(file_storage_path="/a", prefetch_threshold=64, some_option=[1]))
    config = running.config
    assert isinstance(config, EngineConfig)
    assert config.values() == {"file_storage_path": "/a", "some_option": [1]}
    assert running.knobs == replace(BASE, prefetch_threshold=64, prefetch_policy="timeout")


def test_what_the_engine_parses_holds_everything_and_no_path() -> None:
    running = resolved(file(file_storage_path="/a", prefetch_threshold=64))
    text = engine_text(running)
    assert text is not None
    assert json.loads(text) == {
        "file_storage_path": "/a",
        "prefetch_threshold": 64,
        "prefetch_timeout_base": 1.0,
        "prefetch_timeout_per_ki_token": 0.25,
        "hicache_storage_pass_prefix_keys": False,
    }


def test_the_engine_gets_a_copy() -> None:
    """It takes options out of the dictionary that it is given (``tp_lcm_size``)."""
    config = resolved(file(a={"b": 1})).config
    assert isinstance(config, EngineConfig)
    config.values()["a"]["b"] = 2
    assert config.values() == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("target", "error", "reason"),
    [
        (TargetState(backend="fil"), UnknownBackend, None),
        (TargetState(extra_config="{}"), InvalidConfig, "no_backend"),
        (TargetState(backend="file", extra_config="{"), InvalidConfig, "syntax"),
        (TargetState(backend="file", extra_config="@/etc/passwd.json"), InvalidConfig, "outside_config_dirs"),
        (file(prefetch_threshold="64"), InvalidConfig, "bad_knob"),
        (file(file_storage_path=1), InvalidConfig, "bad_type"),
        (file(prefetch_timeout_max=3), UnsupportedByEngine, "unsupported_knob"),
        (file(guard_negative_ttl_s=3), UnsupportedByEngine, "unsupported_knob"),
        (file(guard_epoch_s=-1), InvalidConfig, "bad_knob"),
        (file(guard_deadline_s=0), InvalidConfig, "bad_knob"),
        (TargetState(backend="file", prefetch_policy="never"), InvalidConfig, "unknown_policy"),
        (TargetState(backend="dynamic", extra_config='{"module_path": "m"}'), InvalidConfig, "missing_key"),
    ],
)
def test_refused_before_anything_is_touched(target: TargetState, error: type[HicacheError], reason: str | None) -> None:
    with pytest.raises(error) as caught:
        resolved(target)
    if reason is not None:
        assert caught.value.details["reason"] == reason


def test_a_dynamic_class_must_be_on_the_engines_list() -> None:
    """F18."""
    target = TargetState(
        backend="dynamic",
        extra_config=json.dumps({"backend_name": "b", "module_path": "m", "class_name": "C"}),
    )
    with pytest.raises(Forbidden):
        resolved(target, HICACHE_DYNAMIC_BACKENDS="m:D")
    assert resolved(target, HICACHE_DYNAMIC_BACKENDS="m:C").config is not None


def test_the_same_config_is_the_same_whatever_its_order_or_live_keys() -> None:
    one = resolved(file(file_storage_path="/a", x=1, prefetch_threshold=64))
    two = resolved(file(x=1, file_storage_path="/a", prefetch_threshold=64), one)
    assert compare(one, two).relation == "same"
    live = resolved(file(x=1, file_storage_path="/a", prefetch_threshold=65), one)
    assert (compare(one, live).relation, compare(one, live).changed_keys) == ("live", ["prefetch_threshold"])
    other = resolved(file(x=1, file_storage_path="/b", prefetch_threshold=64), one)
    assert (compare(one, other).relation, compare(one, other).changed_keys) == ("swap", ["file_storage_path"])


def test_no_extra_config_keeps_what_runs() -> None:
    one = resolved(file(file_storage_path="/a", prefetch_threshold=64))
    kept = resolved(TargetState(backend="file", prefetch_policy="wait_complete"), one)
    assert kept.config is one.config
    assert kept.knobs.prefetch_threshold == 64
    assert compare(one, kept).changed_keys == ["hicache_storage_prefetch_policy"]


def test_secrets_are_shown_nowhere_and_still_count() -> None:
    """F94."""
    one = resolved(TargetState(backend="mooncake", extra_config='{"password": "hunter2", "url": "x://u:pw@h/"}'))
    config = one.config
    assert config is not None
    assert config.redacted is not None
    assert "hunter2" not in config.redacted
    assert "pw@" not in config.redacted
    assert "hunter2" not in repr(one)
    two = resolved(TargetState(backend="mooncake", extra_config='{"password": "hunter3", "url": "x://u:pw@h/"}'))
    assert two.config is not None
    assert config.digest != two.config.digest


def test_what_the_engine_attached_itself_is_the_same_config_as_ours() -> None:
    """A backend from the command line, adopted: ordering it again changes nothing."""
    ours = resolved(file(file_storage_path="/a", prefetch_threshold=64))
    theirs = adopted("file", '{"file_storage_path": "/a", "prefetch_threshold": 64}', ours.knobs, NAMESPACE)
    assert compare(theirs, ours).relation == "same"


def test_an_adopted_backend_without_options_can_be_gone_back_to() -> None:
    """No text in a target means "keep what runs"; so what the engine started without text is told as "{}"."""
    started = adopted("file", None, BASE, NAMESPACE)
    assert started.config is not None
    assert started.config.text == started.config.redacted == "{}"
    swapped = resolved(file(file_storage_path="/b"), started)
    back = resolved(TargetState(backend="file", extra_config=started.config.redacted), swapped)
    assert compare(swapped, back).relation == "swap"
    assert compare(started, back).relation == "same"


def test_a_text_of_the_engines_that_cannot_be_read_does_not_break_status() -> None:
    running = adopted("file", "not json", Knobs(), NAMESPACE)
    assert running.config is not None
    assert running.config.redacted == "{}"
    assert adopted("file", "@/nowhere.yaml", Knobs(), NAMESPACE).config is not None


def test_the_guards_keys_are_live_keys_and_no_options() -> None:
    """A store must not see them: many refuse an option that they do not know; and they change without a rebuild."""
    one = resolved(file(file_storage_path="/a"))
    two = resolved(file(file_storage_path="/a", guard_deadline_s=3, guard_min_calls=4), one)
    assert isinstance(two.config, EngineConfig)
    assert two.config.values() == {"file_storage_path": "/a"}
    assert "guard" not in str(engine_text(two))
    assert (two.knobs.guard.deadline_s, two.knobs.guard.min_calls) == (3.0, 4)
    assert one.knobs.guard.deadline_s == 10.0  # SGLang's batches are long
    difference = compare(one, two)
    assert (difference.relation, difference.changed_keys) == ("live", ["guard_deadline_s", "guard_min_calls"])
    theirs = adopted("file", '{"file_storage_path": "/a", "guard_min_calls": 4}', two.knobs, NAMESPACE)
    assert compare(theirs, two).relation == "same"


def test_a_backend_whose_package_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: refused in VALIDATE with the package; where SGLang has a client of its own it is told and tried."""
    monkeypatch.setattr(adapter, "PACKAGES", {"gone": "no_such_package", "hf3fs": "no_such_package", "odd": "odd_one"})
    monkeypatch.setitem(sys.modules, "odd_one", ModuleType("odd_one"))  # without a spec: find_spec raises
    assert adapter.missing_packages("gone") == ["no_such_package"]
    with pytest.raises(BackendUnavailable) as refused:
        adapter._check_package("gone")
    assert "no_such_package" in refused.value.message
    assert refused.value.details == {"missing": ["no_such_package"]}
    assert adapter.missing_packages("hf3fs") == ["no_such_package"]
    for usable in ("hf3fs", "odd", "file"):
        adapter._check_package(usable)
