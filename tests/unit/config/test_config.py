"""Resolving a target: knobs, options, policies, digest, display and comparison."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends import registry
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_hooks.backends.options import BackendOptions, Secret, SecretFile
from hicache_hooks.backends.redis import RedisOptions
from hicache_hooks.cache.config import Running, compare, knob_warnings, resolve, typed_options
from hicache_hooks.cache.config_redact import redact
from hicache_hooks.cache.knobs import Knobs
from hicache_proto.errors import HicacheError, InvalidConfig, UnknownBackend
from hicache_proto.model import KNOBS, TargetState
from hicache_proto.secret_names import is_secret_name

NOTHING = Running(None, Knobs())
ENV: dict[str, str] = {}
SENTINEL = "s3cr3t-SENTINEL"


def target(extra: dict[str, Any] | str | None = None, backend: str | None = "file", **fields: Any) -> TargetState:
    text = json.dumps(extra) if isinstance(extra, dict) else extra
    return TargetState(backend=backend, extra_config=text, **fields)


def run(wanted: TargetState, current: Running = NOTHING, env: dict[str, str] = ENV, namespace: str = "ns") -> Running:
    return resolve(wanted, current, namespace=namespace, env=env)


def refused(wanted: TargetState, current: Running = NOTHING, env: dict[str, str] = ENV) -> HicacheError:
    with pytest.raises(InvalidConfig) as caught:
        run(wanted, current, env)
    return caught.value


@pytest.mark.parametrize("literal", ["true", "-1", "1.5", '"256"', "1e400", "NaN", "null", "[1]", "4294967296"])
def test_prefetch_threshold_is_an_integer_in_range(literal: str) -> None:
    """F53's table."""
    text = '{"file_storage_path": "/x", "prefetch_threshold": ' + literal + "}"
    assert refused(target(text)).status == 422


@pytest.mark.parametrize("key", [k for k in KNOBS if k.startswith("prefetch_timeout")])
@pytest.mark.parametrize("literal", ["true", "-0.1", '"1"', "1e400", "NaN", "1e9", "{}"])
def test_timeouts_are_finite_numbers(key: str, literal: str) -> None:
    """F53: a boolean is no number, nor is Infinity."""
    assert refused(target('{"file_storage_path": "/x", "' + key + '": ' + literal + "}")).status == 422


@pytest.mark.parametrize("literal", ["1", "0", '"true"', "null"])
def test_pass_prefix_keys_is_a_boolean(literal: str) -> None:
    text = '{"file_storage_path": "/x", "hicache_storage_pass_prefix_keys": ' + literal + "}"
    assert refused(target(text)).details["reason"] == "bad_knob"


def test_knobs_are_taken_out_and_defaults_filled_in() -> None:
    """spec.md: the knobs are taken out before the backend sees the config."""
    got = run(target({"file_storage_path": "/x", "prefetch_threshold": 64, "prefetch_timeout_max": 3}))
    assert got.knobs == Knobs(prefetch_threshold=64, prefetch_timeout_max=3.0)
    assert got.config is not None
    assert not set(got.config.option_values()) & set(KNOBS)
    assert run(target({"file_storage_path": "/x", "prefetch_timeout_max": None})).knobs == Knobs()


def test_knobs_of_the_request_override_those_inside() -> None:
    got = run(target({"file_storage_path": "/x", "prefetch_threshold": 64}, knobs={"prefetch_threshold": 8}))
    assert got.knobs.prefetch_threshold == 8
    assert refused(target({"file_storage_path": "/x"}, knobs={"prefetch_threshold": True})).status == 422
    error = refused(target({"file_storage_path": "/x"}, knobs={"prefetch_treshold": 8}))
    assert error.details["suggestion"] == "prefetch_threshold"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("prefetch_treshold", "prefetch_threshold"),
        ("file_storage_pth", "file_storage_path"),
        ("maxsize", "max_size"),
        ("zzz", None),
    ],
)
def test_unknown_keys_get_the_nearest_suggestion(key: str, suggestion: str | None) -> None:
    """F53: an unknown key never vanishes."""
    error = refused(target({"file_storage_path": "/x", key: 1}))
    assert error.details == {"reason": "unknown_key", "suggestion": suggestion}
    assert (suggestion or "file_storage_path") in error.message


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"file_storage_path": 5}, "$.file_storage_path"),
        ({"file_storage_path": "/x", "max_size": True}, "$.max_size"),
        ({"file_storage_path": "/x", "max_size": 1.5}, "$.max_size"),
        ({"file_storage_path": "/x", "eviction_ratio": 0}, "$.eviction_ratio"),
        ({"file_storage_path": "/x", "eviction_ratio": True}, "$.eviction_ratio"),
        ({"file_storage_path": "/x", "eviction_ratio": 1}, "$.eviction_ratio"),
    ],
)
def test_wrong_types_say_where(options: dict[str, Any], path: str) -> None:
    """F53, F94: place and type, never the value."""
    error = refused(target(options))
    assert error.details == {"reason": "bad_type", "path": path}


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ({}, RedisOptions, "option 'url' must be given"),
        ({"plugin": {SENTINEL: {}}}, NixlOptions, "Not an allowed value at a key of $.plugin"),
    ],
)
def test_what_is_absent_or_no_choice_is_named(values: dict[str, Any], options: Any, said: str) -> None:
    """F53, F94."""
    with pytest.raises(InvalidConfig) as caught:
        typed_options(values, options)
    assert caught.value.message == said


@pytest.mark.parametrize("size", ["", "-1", "10 apples", "1e9", "0x10", "nan", SENTINEL, -1, 2**62])
def test_sizes_that_are_none(size: object) -> None:
    error = refused(target({"file_storage_path": "/x", "max_size": size}))
    assert error.details["reason"] == "bad_value"
    assert SENTINEL not in error.message


def test_bad_json_and_shapes() -> None:
    for text in ("", " ", "{", "[]", "7", "@", "@relative.json", "@/etc/hicache/x.ini"):
        assert refused(target(text)).status == 422, text
    assert refused(target({"a": 1}, backend=None)).details["reason"] == "no_backend"


def test_unknown_backend_lists_the_known() -> None:
    for name in ("nope", "nixl2", "Mooncake", "File", "", "x" * 100, "a\nb"):
        with pytest.raises(UnknownBackend) as caught:
            run(target({}, backend=name))
        assert caught.value.details["known"] == list(registry.KNOWN)
        assert "\n" not in caught.value.message


def test_unknown_policies_list_the_allowed() -> None:
    """F60."""
    error = refused(target({"file_storage_path": "/x"}, write_policy="write-through"))
    assert error.details["allowed"] == ["write_back", "write_through", "write_through_selective"]
    assert all(name in error.message for name in error.details["allowed"])
    assert refused(target(backend=None, prefetch_policy="eager")).details["allowed"][0] == "best_effort"


def test_silent_policies_stay_as_they_are() -> None:
    current = Running(None, Knobs(prefetch_policy="timeout", write_policy="write_back"))
    got = run(target({"file_storage_path": "/x"}, write_policy="write_through"), current)
    assert (got.knobs.prefetch_policy, got.knobs.write_policy) == ("timeout", "write_through")


def test_a_file_is_read_and_its_path_shown(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'file_storage_path = "/x/{SENTINEL}"\nprefetch_threshold = 5\n')
    env = {"HICACHE_CONFIG_DIRS": str(tmp_path)}
    text = f"@{tmp_path}/c.toml"
    got = run(target(text), env=env)
    assert got.knobs.prefetch_threshold == 5
    assert got.config is not None
    assert got.config.redacted == text
    (tmp_path / "c.toml").write_text('file_storage_path = "/y"\n')
    again = run(target(text), got, env)
    assert compare(got, again).changed_keys == ["file_storage_path", "prefetch_threshold"]


def test_the_environment_counts_when_the_option_is_silent() -> None:
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/from/env"}
    by_env = run(target(), env=env)
    by_option = run(target({"file_storage_path": "/from/env"}))
    assert by_env.config is not None
    assert by_option.config is not None
    assert by_env.config.digest == by_option.config.digest
    assert refused(target()).details["reason"] == "missing_option"


# ------------------------------------------------------------------ comparison


def test_the_same_again_is_no_change() -> None:
    """interface.md: everything equal -> no change, however it is written."""
    first = run(target('{"file_storage_path": "/x", "max_size": "10gb"}'))
    again = run(target('{ "max_size": 10737418240, "file_storage_path": "/x/" }'), first)
    assert compare(first, again).relation == "same"
    assert compare(NOTHING, run(target(backend=None))).relation == "same"


def test_live_keys_are_listed_by_their_own_names() -> None:
    """F20: prefetch_threshold 256 -> 64 is a live change."""
    first = run(target({"file_storage_path": "/x", "prefetch_threshold": 256}))
    second = run(target({"file_storage_path": "/x", "prefetch_threshold": 64}, write_policy="write_back"), first)
    got = compare(first, second)
    assert got.relation == "live"
    assert got.changed_keys == ["hicache_write_policy", "prefetch_threshold"]


def test_other_options_need_a_swap() -> None:
    """F20: another path is a swap, with the key."""
    first = run(target({"file_storage_path": "/x"}))
    got = compare(first, run(target({"file_storage_path": "/y"}), first))
    assert (got.relation, got.changed_keys) == ("swap", ["file_storage_path"])


def test_another_backend_attach_and_detach() -> None:
    first = run(target({"file_storage_path": "/x"}))
    other = replace(first, config=replace(first.config, backend="other"))  # type: ignore[type-var]
    assert compare(first, other).relation == "swap"
    assert compare(NOTHING, first).relation == "attach"
    assert compare(first, NOTHING).relation == "detach"
    assert compare(first, NOTHING).changed_keys == ["hicache_storage_backend"]
    assert compare(NOTHING, replace(NOTHING, knobs=Knobs(write_policy="write_back"))).relation == "live"


def test_a_silent_config_keeps_the_present_one() -> None:
    """TargetState: ``extra_config`` None on the same backend keeps config and knobs."""
    first = run(target({"file_storage_path": "/x", "prefetch_threshold": 64}))
    got = run(target(knobs={"prefetch_timeout_base": 2}), first)
    assert got.config is first.config
    assert compare(first, got).changed_keys == ["prefetch_timeout_base"]
    assert got.knobs.prefetch_threshold == 64


def test_another_namespace_needs_a_swap() -> None:
    """F50."""
    first = run(target({"file_storage_path": "/x"}), namespace="a")
    got = compare(first, run(target({"file_storage_path": "/x"}), first, namespace="b"))
    assert (got.relation, got.changed_keys) == ("swap", ["namespace"])


def test_thresholds_above_the_pool_are_said() -> None:
    """F53: it turns prefetch off, so the answer says so."""
    assert "prefetch_threshold" in knob_warnings(Knobs(prefetch_threshold=1025), l2_tokens=1024)[0]
    assert knob_warnings(Knobs(prefetch_threshold=1024), l2_tokens=1024) == []
    assert "prefetch_timeout_max" in knob_warnings(Knobs(prefetch_timeout_max=0.5), 1024)[0]


# ------------------------------------------------------------------ secrets


class SecretOptions(BackendOptions, frozen=True, kw_only=True):
    url: str = ""
    password: Secret = ""
    pin: Secret | None = None
    password_file: SecretFile = ""


@pytest.fixture
def secret_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(registry.KNOWN["file"].load(), options=SecretOptions)
    monkeypatch.setattr(registry, "usable", lambda name: made)


@pytest.mark.usefixtures("secret_backend")
def test_inline_secrets_are_hashed_and_never_shown() -> None:
    """F94: redacted in what is shown, part of the digest, not in any repr."""
    first = run(target({"password": SENTINEL, "pin": SENTINEL, "url": f"redis://u:{SENTINEL}@h:1/0"}))
    assert first.config is not None
    assert SENTINEL not in (first.config.redacted or "") + repr(first)
    assert first.config.redacted == '{"password": "***", "pin": "***", "url": "redis://u:***@h:1/0"}'
    second = run(target({"password": "other", "pin": SENTINEL, "url": f"redis://u:{SENTINEL}@h:1/0"}), first)
    assert compare(first, second).changed_keys == ["password"]
    error = refused(target({"password": {"x": SENTINEL}}))
    assert SENTINEL not in error.message + repr(error.details)


@pytest.mark.usefixtures("secret_backend")
def test_a_secret_file_counts_by_its_content(tmp_path: Path) -> None:
    env = {"HICACHE_CONFIG_DIRS": str(tmp_path)}
    file = tmp_path / "pw"
    file.write_text(SENTINEL)
    first = run(target({"password_file": str(file)}), env=env)
    assert first.config is not None
    assert first.config.redacted == json.dumps({"password_file": str(file)})
    file.write_text("rotated")
    second = run(target({"password_file": str(file)}), first, env)
    got = compare(first, second)
    assert (got.relation, got.changed_keys) == ("swap", ["password_file"])
    assert refused(target({"password_file": "/etc/shadow"}), env=env).details["reason"] == "outside_config_dirs"


def test_a_config_without_secrets_is_shown_as_written() -> None:
    text = '{ "file_storage_path":"/x",\n "max_size": "10gb" }'
    got = run(target(text)).config
    assert got is not None
    assert got.redacted == text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"db_password": "x"}, {"db_password": "***"}),
        ({"secretKey": "x"}, {"secretKey": "***"}),
        ({"nested": [{"api_key": 5}]}, {"nested": [{"api_key": "***"}]}),
        ({"auth_token": {"a": 1}}, {"auth_token": "***"}),
        ({"token": ""}, {"token": ""}),
        ({"use_token": True}, {"use_token": True}),
        ({"dsn": "host=a;password=b;x=1"}, {"dsn": "host=a;password=***;x=1"}),
        ({"u": "http://tok@h and s3://a:b@c@d/e"}, {"u": "http://***@h and s3://a:***@d/e"}),
        ({"u": "redis://:pw@h:1"}, {"u": "redis://:***@h:1"}),
        ({"u": "http://h:80/a@b"}, {"u": "http://h:80/a@b"}),
        ({"u": "http://h/?token=abc&x=1"}, {"u": "http://h/?token=***&x=1"}),
        ({"prefetch_timeout_per_ki_token": 1}, {"prefetch_timeout_per_ki_token": 1}),
        ({"token_file": "/run/t"}, {"token_file": "/run/t"}),
        ({"monkey": "x"}, {"monkey": "x"}),
    ],
)
def test_undeclared_secrets_are_found_by_name(values: dict[str, Any], shown: dict[str, Any]) -> None:
    """F94 for dynamic backends, whose options nobody declared."""
    assert json.loads(redact(json.dumps(values), values)) == shown


def test_secret_names() -> None:
    assert is_secret_name("access_key")
    assert is_secret_name("AWS_SECRET_ACCESS_KEY")
    assert not is_secret_name("key_prefix")
    assert not any(is_secret_name(name) for name in KNOBS)


@pytest.mark.usefixtures("secret_backend")
@pytest.mark.parametrize("text", ['{"password": "%s"', '{"password": ["%s"]}', '{"%s": 1}', '{"pin": "%s", "pin": 1}'])
def test_refusals_hold_no_secret(text: str) -> None:
    """F94: the sentinel test over every kind of malformed config."""
    error = refused(target(text.replace("%s", SENTINEL)))
    assert SENTINEL not in error.message + repr(error.details) + repr(error.__context__)
