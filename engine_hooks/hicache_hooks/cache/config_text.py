"""Strict parsing of the extra config's text: JSON, TOML or YAML into plain, checked values.

The three formats end in one model, JSON's: maps with string keys, lists, strings, finite numbers, booleans, null.
Everything else is refused: duplicate keys, NaN and Infinity, 1e400, dates, YAML tags and aliases (F53). Error texts
give the position and what was expected, never the content, because the text may hold secrets (F94); for the same
reason parser exceptions, which carry the text, are never chained.
"""

import json
import math
import re
import tomllib
from typing import Any

from hicache_proto.errors import InvalidConfig

MAX_DEPTH = 16
MAX_TEXT_BYTES = 1 << 20  # as a frame (interface.md); a config of this size is a mistake
_INT_LIMIT = 1 << 63  # what msgpack and TOML can carry
_TOML_PLACE = re.compile(r"\(at (line \d+, column \d+|end of document)\)")
# A name like this is an option's; anything else may be a misplaced secret and is not repeated in an error.
_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_.]{0,47}")

Value = dict[str, Any] | list[Any] | str | int | float | bool | None


def parse(text: str, fmt: str) -> dict[str, Any]:
    """The top-level map of ``text``, written in ``fmt`` (``json``, ``toml`` or ``yaml``).

    Raises:
        InvalidConfig: as the module's text says; ``details`` = ``{reason, ...}``.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise bad(f"the extra config is longer than {MAX_TEXT_BYTES} bytes", "too_long")
    loader = {"json": _from_json, "toml": _from_toml, "yaml": _from_yaml}[fmt]
    try:
        value = loader(text)
    except RecursionError:
        value = None
        too_deep = True
    else:
        too_deep = False
    if too_deep:
        raise bad(f"the extra config is nested deeper than {MAX_DEPTH} levels", "too_deep")
    if not isinstance(value, dict):
        raise bad(f"the extra config must be a map of options, got {kind(value)}", "not_a_map")
    check_tree(value)
    return value


def bad(message: str, reason: str, **details: Any) -> InvalidConfig:
    """One error of this module."""
    return InvalidConfig(message, details={"reason": reason, **details})


def kind(value: object) -> str:
    """JSON's name for a value's type."""
    names = {dict: "a map", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def safe_name(key: str) -> str:
    """``key`` quoted when it looks like an option's name, else a placeholder."""
    return repr(key) if _PLAIN_NAME.fullmatch(key) else "(not shown)"


def check_tree(value: object, path: str = "$", depth: int = 1) -> None:
    """Refuse what JSON cannot hold, what cannot be encoded, and too much depth.

    Raises:
        InvalidConfig: with the path of the first offender.
    """
    match value:
        case bool() | None:
            return
        case int():
            if not -_INT_LIMIT <= value < _INT_LIMIT:
                raise bad(f"{path}: integer out of range", "not_finite")
        case float():
            if not math.isfinite(value):
                raise bad(f"{path}: number is not finite", "not_finite")
        case str():
            _check_string(value, path)
        case dict() | list():
            if depth > MAX_DEPTH:
                raise bad(f"the extra config is nested deeper than {MAX_DEPTH} levels", "too_deep")
            items = value.items() if isinstance(value, dict) else ((str(i), item) for i, item in enumerate(value))
            for key, item in items:
                if not isinstance(key, str):
                    raise bad(f"{path}: keys must be strings, got {kind(key)}", "bad_key")
                _check_string(key, path)
                step = f"[{key}]" if isinstance(value, list) else f".{key if _PLAIN_NAME.fullmatch(key) else '?'}"
                check_tree(item, path + step, depth + 1)
        case _:
            raise bad(f"{path}: {kind(value)} is not a value of JSON", "bad_type")


def _check_string(text: str, path: str) -> None:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise bad(f"{path}: string with a NUL or half a surrogate pair", "bad_string")


# ------------------------------------------------------------------ JSON


def _from_json(text: str) -> Value:
    failed = ""
    try:
        value: Value = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_float)
        return value
    except json.JSONDecodeError as exc:
        failed = f"not valid JSON at line {exc.lineno}, column {exc.colno}"
    except ValueError:  # an integer of more than 4300 digits
        failed = "a number is too long"
    raise bad(failed, "syntax")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise bad(f"duplicate key {safe_name(twice)}", "duplicate_key")
    return out


def _constant(name: str) -> Value:
    raise bad(f"{name} is not a finite number", "not_finite")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad("a number is too large", "not_finite")
    return value


# ------------------------------------------------------------------ TOML, YAML


def _from_toml(text: str) -> Value:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        place = _TOML_PLACE.search(str(exc))
    raise bad(f"not valid TOML at {place[1]}" if place else "not valid TOML", "syntax")


def _from_yaml(text: str) -> Value:
    try:
        from hicache_hooks.cache import config_yaml
    except ImportError:
        missing = True
    else:
        missing = False
    if missing:
        raise bad("YAML files need the package PyYAML on the engine's host; JSON and TOML need nothing", "no_yaml")
    value: Value = config_yaml.load(text)
    return value
