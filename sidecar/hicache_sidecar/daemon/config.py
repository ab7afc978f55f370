"""Where settings come from: flags override the file, the file overrides HICACHE_SIDECAR_*, that overrides the defaults.

The two directories have one more source between the environment and the built-in default: what systemd made for the
unit ($RUNTIME_DIRECTORY, $STATE_DIRECTORY). An unknown key is an error wherever it stands, with the nearest known name.
"""

import difflib
import os
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from hicache_sidecar.core.explain import explain
from hicache_sidecar.daemon.settings import Settings, seconds_of, split_address

PREFIX = "HICACHE_SIDECAR_"
# Variables with our prefix that other programs read.
_FOREIGN = frozenset({"SOCKET", "CONFIG"})
# Short names beside the systematic ones (table_key).
_ALIASES = {"HTTP": ("http", "listen")}
_MAX_FILE_BYTES = 1 << 20


class ConfigError(Exception):
    """The configuration cannot be used. The text names the source and the key, never a value that may be secret."""


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None = None) -> Settings:
    """Merge all sources and check them.

    Args:
        flags: settings by dotted key, None where a flag was not given.
        path: the TOML file; None means $HICACHE_SIDECAR_CONFIG, or none.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong type or value.
    """
    merged: dict[str, Any] = {}
    for variable, key in (("RUNTIME_DIRECTORY", "runtime_dir"), ("STATE_DIRECTORY", "state_dir")):
        if environ.get(variable):
            merged[key] = environ[variable].split(":")[0]  # systemd lists several with colons
    _merge(merged, _from_environment(environ))
    if path is None and environ.get(PREFIX + "CONFIG"):
        path = Path(environ[PREFIX + "CONFIG"])
    if path is not None:
        _merge(merged, _from_file(path))
    for key, value in flags.items():
        if value is not None:
            _merge(merged, _nested(tuple(key.split(".")), value))
    try:
        settings = msgspec.convert(merged, Settings)
    except msgspec.ValidationError as exc:
        text, _ = explain(exc, Settings)
        raise ConfigError(text.replace("$.", "").replace("`$`", "the configuration")) from None
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """What one key's type cannot say."""
    for key in ("runtime_dir", "state_dir"):
        if not Path(getattr(settings, key)).is_absolute():
            raise ConfigError(f"{key} must be an absolute path")
    if os.path.realpath(settings.runtime_dir) == os.path.realpath(settings.state_dir):
        raise ConfigError("runtime_dir and state_dir must differ")
    if settings.http.listen:
        try:
            split_address(settings.http.listen)
        except ValueError as exc:
            raise ConfigError(f"http.listen: {exc}") from None
    if not settings.leases.freeze_s < settings.leases.in_doubt_s:
        raise ConfigError("leases.in_doubt_s must be longer than leases.freeze_s")
    if not settings.hooks.heartbeat_s < settings.hooks.liveness_s:
        raise ConfigError("hooks.liveness_s must be longer than hooks.heartbeat_s")


# ---- the sources


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"config file {path}: {exc.strerror}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"config file {path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        document = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {path}: {exc}") from None
    _known(document, Settings, f"config file {path}", "")
    return _with_durations(document, Settings)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    leaves = {"_".join(key).upper(): (key, kind) for key, kind in _leaves(Settings)}
    leaves |= {name: (key, dict(_leaves(Settings))[key]) for name, key in _ALIASES.items()}
    found: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name in _FOREIGN:
            continue
        if name not in leaves:
            raise ConfigError(f"environment: {variable} is no setting{_nearest(name, leaves, PREFIX)}")
        key, kind = leaves[name]
        _merge(found, _nested(key, _parse(environ[variable], kind, variable)))
    return found


def _parse(text: str, kind: Any, variable: str) -> Any:
    """A variable's text as the setting's type: lists by comma, tables as ``name=value`` by comma."""
    value: Any = text
    if _is(kind, list):
        value = [item.strip() for item in text.split(",") if item.strip()]
    elif _is(kind, dict):
        value = dict(item.strip().partition("=")[::2] for item in text.split(",") if item.strip())
    elif _is(kind, float):
        value = seconds_of(text)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"environment: {variable}: {exc}") from None


# ---- walking the types


def _leaves(table: type, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, kind in get_type_hints(table, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _leaves(kind, (*prefix, name))
        else:
            yield (*prefix, name), kind


def _is(kind: Any, wanted: type) -> bool:
    if get_origin(kind) is Annotated:
        return _is(get_args(kind)[0], wanted)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is(part, wanted) for part in get_args(kind))
    return kind is wanted or get_origin(kind) is wanted


def _known(document: Mapping[str, Any], table: type, source: str, prefix: str) -> None:
    hints = get_type_hints(table)
    for key, value in document.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {prefix}{key}{_nearest(key, hints, prefix)}")
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            _known(value, kind, source, f"{prefix}{key}.")


def _with_durations(document: Mapping[str, Any], table: type) -> dict[str, Any]:
    """Duration strings of float settings as seconds."""
    hints = get_type_hints(table, include_extras=True)
    made: dict[str, Any] = {}
    for key, value in document.items():
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            made[key] = _with_durations(value, kind)
        else:
            made[key] = seconds_of(value) if _is(kind, float) else value
    return made


def _nearest(name: str, known: Mapping[str, Any], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _nested(key: tuple[str, ...], value: Any) -> dict[str, Any]:
    for part in reversed(key):
        value = {part: value}
    return dict(value)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Deep merge; of two tables of names (access) the higher source's entries are added, its keys win."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
