"""The extra config's text: strict in three formats, and silent about its content."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_hooks.cache.config_text import MAX_DEPTH, MAX_TEXT_BYTES, parse
from hicache_proto.errors import InvalidConfig

SENTINEL = "s3cr3t-SENTINEL"


def refused(text: str, fmt: str = "json") -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, fmt)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "the parser's exception carries the text"
    return caught.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "not_a_map"),
        ("3", "not_a_map"),
        ('"x"', "not_a_map"),
        ("null", "not_a_map"),
        ("", "syntax"),
        ('{"a": 1', "syntax"),
        ("{'a': 1}", "syntax"),
        ('{"a": 1,}', "syntax"),
        ('{"a": NaN}', "not_finite"),
        ('{"a": -Infinity}', "not_finite"),
        ('{"a": 1e400}', "not_finite"),
        ('{"a": 99999999999999999999}', "not_finite"),
        ('{"a": ' + "9" * 5000 + "}", "syntax"),
        ('{"a": 1, "b": 2, "a": 1}', "duplicate_key"),
        ('{"a": {"b": 1, "b": 1}}', "duplicate_key"),
        ('{"a": "\\ud800"}', "bad_string"),
        ('{"a": "\\u0000"}', "bad_string"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "too_deep"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "too_deep"),
        ('{"a": "' + "x" * MAX_TEXT_BYTES + '"}', "too_long"),
    ],
)
def test_json_that_is_refused(text: str, reason: str) -> None:
    """F52, F53: lists and numbers, non-finite numbers, duplicate keys, bad syntax, depth, length."""
    assert refused(text).details["reason"] == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = inf", "not_finite"),
        ("a = 2026-01-01", "bad_type"),
        ("a = 1\na = 2", "syntax"),
        ("a = ", "syntax"),
    ],
)
def test_toml_that_is_refused(text: str, reason: str) -> None:
    """F53 in TOML, and what JSON cannot hold."""
    assert refused(text, "toml").details["reason"] == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: .nan", "not_finite"),
        ("a: 1e400", "not_finite"),
        ("a: 1\na: 1", "duplicate_key"),
        ("a: &x [1]\nb: *x", "syntax"),
        ("a: !!python/object:os.system x", "syntax"),
        ("a: !!str 1", "syntax"),
        ("1: x", "syntax"),
        ("- 1", "not_a_map"),
        ("a: 1\n---\nb: 1", "syntax"),
        ("a: [1", "syntax"),
        ("a: \x07", "syntax"),
        ("a: " + "[" * 3000 + "]" * 3000, "too_deep"),
    ],
)
def test_yaml_that_is_refused(text: str, reason: str) -> None:
    """F53 in YAML; tags, aliases and several documents are no part of a config."""
    assert refused(text, "yaml").details["reason"] == reason


def test_the_three_formats_mean_the_same() -> None:
    expected = {"path": "/x", "size": 10, "ratio": 0.5, "on": True, "nested": {"list": [1, "a"]}}
    json_text = '{"path": "/x", "size": 10, "ratio": 0.5, "on": true, "nested": {"list": [1, "a"]}}'
    toml_text = 'path = "/x"\nsize = 10\nratio = 0.5\non = true\n[nested]\nlist = [1, "a"]\n'
    yaml_text = "path: /x\nsize: 10\nratio: 0.5\non: true\nnested:\n  list: [1, a]\n"
    assert parse(json_text, "json") == parse(toml_text, "toml") == parse(yaml_text, "yaml") == expected


def test_yaml_plain_words_stay_strings() -> None:
    """``yes``, ``1:30`` and dates are the strings that they look like."""
    assert parse("a: yes\nb: 1:30\nc: 2026-01-01\nd: ~\ne: 0123", "yaml") == {
        "a": "yes",
        "b": "1:30",
        "c": "2026-01-01",
        "d": None,
        "e": "0123",
    }


@pytest.mark.parametrize("fmt", ["json", "toml", "yaml"])
@pytest.mark.parametrize(
    "text",
    [
        '{"password": "%s',
        '{"password": "%s", }',
        '{"%s": 1, "%s": 2}',
        'password = "%s\n',
        "password: [%s",
        "password: !!%s x",
        "%s",
        '{"%s": {"%s": 1e400}}',
        "%s: 1\n%s: 2",
        '"%s" = 1\n"%s" = 2',
    ],
)
def test_errors_never_repeat_content(text: str, fmt: str) -> None:
    """F94: whatever is wrong, the error holds position and type only."""
    error: InvalidConfig | None = None
    try:
        parse(text.replace("%s", SENTINEL), fmt)
    except InvalidConfig as exc:
        error = exc
    if error is not None:  # some of the texts are valid in one of the formats
        assert SENTINEL not in error.message + repr(error.details)
        assert error.__context__ is None
        assert error.__cause__ is None


def test_errors_say_where() -> None:
    assert "line 2, column 8" in refused('{"a": 1,\n  "b": x}').message
    assert "line 2" in refused("a = 1\nb = =", "toml").message
    assert "line 2" in refused("a: 1\nb: [", "yaml").message or "line 3" in refused("a: 1\nb: [", "yaml").message
    assert "$.nested.list[1]" in refused("[nested]\nlist = [1, nan]", "toml").message


@given(st.text(max_size=200), st.sampled_from(["json", "toml", "yaml"]))
def test_any_text_is_a_map_or_a_refusal(text: str, fmt: str) -> None:
    """Nothing but InvalidConfig comes out, whatever goes in."""
    try:
        value = parse(text, fmt)
    except InvalidConfig:
        return
    assert isinstance(value, dict)


def test_depth_limit_is_exact() -> None:
    text = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse('{"a": ' + text + "}", "json")
    assert refused('{"a": [' + text + "]}").details["reason"] == "too_deep"
