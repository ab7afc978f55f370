"""A target state resolved for SGLang: the engine's own backends and options, our rules for text, knobs and secrets.

The options of a backend are the engine's business: SGLang has no schema of them, so they are handed over as they
are. Checked here is what can be: the text (strict parsing, files only below ``HICACHE_CONFIG_DIRS``), the knobs and
policies, the backend's name, the allow-list of dynamic classes, and what would go wrong in silence.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hicache_hooks.backends.dynamic import ALLOW_ENV, allowed
from hicache_hooks.backends.options import BackendOptions
from hicache_hooks.cache.config import KEPT_BACK, ResolvedConfig, Running, live_keys, load
from hicache_hooks.cache.config_redact import redact
from hicache_hooks.cache.config_text import bad
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.guard_settings import PREFIX, GuardSettings
from hicache_hooks.sglang.guard_core import CALL_DEADLINE_S
from hicache_hooks.sglang.versions import SRT
from hicache_proto.errors import Forbidden, UnknownBackend, UnsupportedByEngine
from hicache_proto.model import KNOBS, TargetState
from hicache_proto.secret_names import is_secret_name

FILE = "file"
DYNAMIC = "dynamic"
FILE_PATH_KEY = "file_storage_path"
BASE = Knobs(guard=GuardSettings(deadline_s=CALL_DEADLINE_S))  # what nobody set
_SECRET_ROUNDS = 10_000  # as cache/config.py: a digest goes to everybody who may read status


class EngineOptions(BackendOptions, frozen=True, kw_only=True):
    """The engine's options of one backend, as the caller wrote them, knobs taken out. May hold secrets."""

    values: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineConfig(ResolvedConfig):
    """``ResolvedConfig`` whose options are the engine's."""

    def option_values(self) -> dict[str, Any]:
        """The options by name."""
        return self.values()

    def values(self) -> dict[str, Any]:
        """A copy to hand to the engine, which changes what it is given."""
        options = self.options
        return _copy(options.values) if isinstance(options, EngineOptions) else {}


def registered() -> list[str]:
    """Backends of this SGLang's own registry, sorted, ``dynamic`` too."""
    factory = importlib.import_module(f"{SRT}.mem_cache.storage.backend_factory").StorageBackendFactory
    return sorted({*factory._registry, DYNAMIC})


def resolve(
    target: TargetState, current: Running, *, namespace: str, known: list[str], env: Mapping[str, str] = os.environ
) -> Running:
    """The effective form of ``target``, given what runs now.

    Raises:
        UnknownBackend, InvalidConfig, Forbidden: see the module's text.
        UnsupportedByEngine: ``prefetch_timeout_max`` or ``guard_negative_ttl_s``, which it lacks.
    """
    name = target.backend
    if name is None:
        if target.extra_config is not None:
            raise bad("an extra config without a backend", "no_backend")
        return Running(None, live_keys(target, current.knobs, {}, BASE))
    if name not in known:
        raise UnknownBackend(f"no such backend in this SGLang; it has {', '.join(known)}", details={"known": known})
    kept = current.config
    if target.extra_config is None and kept is not None and kept.backend == name:
        return Running(kept, _checked(live_keys(target, current.knobs, None)))
    values = {} if target.extra_config is None else load(target.extra_config, env)
    knobs = _checked(live_keys(target, current.knobs, values, BASE))
    options = {key: value for key, value in values.items() if key not in KEPT_BACK}
    if name == DYNAMIC:
        _check_dynamic(options, env)
    if name == FILE and not isinstance(options.get(FILE_PATH_KEY, ""), str):
        raise bad(f"{FILE_PATH_KEY} must be a string", "bad_type", key=FILE_PATH_KEY)
    return Running(make_config(name, options, target.extra_config, namespace), knobs)


def check_watchdog(knobs: Knobs, watchdog_s: float | None) -> None:
    """A call of a store is given up before the engine's watchdog would kill its ranks (F74). None: no watchdog.

    Raises:
        InvalidConfig: reason ``deadline_exceeds_watchdog``, with both in seconds.
    """
    deadline_s = knobs.guard.deadline_s
    if watchdog_s is not None and deadline_s >= watchdog_s:
        raise bad(
            f"{PREFIX}deadline_s ({deadline_s:g} s) must be below the engine's watchdog ({watchdog_s:g} s)",
            "deadline_exceeds_watchdog",
            key=f"{PREFIX}deadline_s",
            deadline_s=deadline_s,
            watchdog_s=watchdog_s,
        )


def make_config(backend: str, options: dict[str, Any], text: str | None, namespace: str) -> EngineConfig:
    """A config out of parsed options."""
    shown = text
    if text is not None and not text.startswith("@"):
        shown = redact(text, load(text, {}) if text.strip() else {})
    return EngineConfig(
        backend=backend,
        options=EngineOptions(values=options),
        text=text,
        redacted=shown,
        digest=_digest(backend, options),
        namespace=namespace,
    )


def adopted(backend: str, text: str | None, knobs: Knobs, namespace: str) -> Running:
    """What the engine attached by itself (at its start, or through its own API), as it reports it.

    The engine's text is not ours: what cannot be read counts as no options, so that status still works. No text is
    told as "{}": a target without text would mean "keep what runs", and a roll-back to this state would change nothing.
    """
    text = text or "{}"
    try:
        values = load(text, {}) if not text.startswith("@") else {}
    except Exception:
        values, text = {}, "{}"
    options = {key: value for key, value in values.items() if key not in KEPT_BACK}
    return Running(make_config(backend, options, text, namespace), knobs)


def engine_text(running: Running) -> str | None:
    """The extra config as the engine's own parser takes it: JSON, options and knobs; never a path (no I/O later)."""
    config, knobs = running.config, running.knobs
    if not isinstance(config, EngineConfig):
        return None
    own = {key: getattr(knobs, key) for key in KNOBS if key != "prefetch_timeout_max"}
    return json.dumps({**config.values(), **own})


def _checked(knobs: Knobs) -> Knobs:
    if knobs.prefetch_timeout_max is not None:
        raise _unsupported("prefetch_timeout_max")
    if knobs.guard.negative_ttl_s != BASE.guard.negative_ttl_s:  # SGLang asks its store each time
        raise _unsupported(f"{PREFIX}negative_ttl_s")
    return knobs


def _unsupported(key: str) -> UnsupportedByEngine:
    return UnsupportedByEngine(f"SGLang has no {key}; leave it out", details={"reason": "unsupported_knob", "key": key})


def _check_dynamic(options: dict[str, Any], env: Mapping[str, str]) -> None:
    for key in ("backend_name", "module_path", "class_name"):
        if not isinstance(options.get(key), str) or not options[key]:
            raise bad(f"backend 'dynamic' needs the string option {key!r}", "missing_key", key=key)
    if f"{options['module_path']}:{options['class_name']}" not in allowed(env):
        raise Forbidden(
            f"this class is not in {ALLOW_ENV} of the engine's environment", details={"reason": "not_allowlisted"}
        )


def _digest(backend: str, options: dict[str, Any]) -> str:
    canonical = json.dumps({"backend": backend, "options": _hide(options)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _hide(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _hide(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide(item, name) for item in value]
    if name and is_secret_name(name) and isinstance(value, str) and value:
        return hashlib.pbkdf2_hmac("sha256", value.encode(), name.encode(), _SECRET_ROUNDS).hex()
    return value


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    copied = json.loads(json.dumps(values))  # what was parsed from JSON, TOML or YAML is JSON's model (config_text)
    return copied if isinstance(copied, dict) else {}
