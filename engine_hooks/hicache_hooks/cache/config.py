"""The extra config of one backend, resolved: typed options, prefetch knobs, what may be shown, and a digest.

``resolve`` turns a ``TargetState`` into a ``ResolvedConfig`` without touching anything but the files that it names;
``compare`` tells what moving from one to another would mean (F20). A config that is refused was refused whole:
nothing has been opened, imported or changed (F53).
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import msgspec

from hicache_hooks.backends import registry
from hicache_hooks.backends.options import BackendOptions
from hicache_hooks.cache.config_redact import redact, secret_fields
from hicache_hooks.cache.config_source import config_format, read_text
from hicache_hooks.cache.config_text import bad, kind, parse, safe_name
from hicache_hooks.cache.instance import INSTANCE, instance_of
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.guard_settings import GUARD_KNOBS, PREFIX, GuardSettings, changed
from hicache_proto.errors import InvalidConfig
from hicache_proto.model import KNOBS, PREFETCH_POLICIES, WRITE_POLICIES, KnobValue, TargetState

MAX_THRESHOLD_TOKENS = 1 << 30
MAX_TIMEOUT_S = 86_400.0
KEPT_BACK = (*KNOBS, *GUARD_KNOBS)  # keys of the extra config that the backend does not see
# A digest goes to everybody who may read status; a slow hash keeps a short secret from being guessed out of it.
_SECRET_ROUNDS = 10_000
_TYPE_ERROR = re.compile(
    r"(Expected `[^`]+`(?: (?:of length )?[<>]=? ?-?[0-9.]+)?(?:, got `[a-z]+`)?)(?: - at `(\$[^`]*)`)?$"
)
_MISSING = re.compile(r"Object missing required field `(\w+)`$")  # a name of our own


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """One backend's effective configuration on this rank. ``options`` may hold secrets: never logged."""

    backend: str
    options: BackendOptions = field(repr=False)
    text: str | None = field(repr=False)  # as requested; may hold secrets
    redacted: str | None  # ``text`` with secrets masked; what status shows
    digest: str  # of backend, options and secrets; not of the live keys, which are compared by value
    namespace: str
    instance: str = ""  # the operator's name for this store (F92)

    def option_values(self) -> dict[str, Any]:
        """The options as plain values, defaults included."""
        values = msgspec.to_builtins(self.options)
        return values if isinstance(values, dict) else {}


@dataclass(frozen=True, slots=True)
class Running:
    """What a rank runs now, or would run: ``config`` None = no backend. ``knobs`` are the live keys."""

    config: ResolvedConfig | None
    knobs: Knobs


@dataclass(frozen=True, slots=True)
class Difference:
    """What moving between two ``Running`` means. ``changed_keys``: live keys and options by name, sorted."""

    relation: str  # "same" | "live" | "attach" | "swap" | "detach"
    changed_keys: list[str]


def resolve(
    target: TargetState,
    current: Running,
    *,
    namespace: str,
    env: Mapping[str, str] = os.environ,
) -> Running:
    """The effective form of ``target``, given what runs now (``TargetState`` says what its ``None`` mean).

    Raises:
        UnknownBackend, BackendUnavailable: no such backend, or not usable here.
        InvalidConfig: anything wrong with the text, a knob, an option or a policy; ``details.reason`` says what.
    """
    policies = _policies(target, current.knobs)
    if target.backend is None:
        if target.extra_config is not None:
            raise bad("an extra config without a backend", "no_backend")
        return Running(None, _knobs(policies, {}, target.knobs))
    spec = registry.usable(target.backend)
    kept = current.config
    if target.extra_config is None and kept is not None and kept.backend == target.backend:
        base = replace(policies, guard=current.knobs.guard)
        return Running(kept, _knobs(base, _knob_values(current.knobs), target.knobs))
    values = {} if target.extra_config is None else load(target.extra_config, env)
    own = {key: value for key, value in values.items() if key not in KEPT_BACK and key != INSTANCE}
    instance = instance_of(values)
    options = typed_options(own, spec.options).effective(env)
    config = ResolvedConfig(
        backend=target.backend,
        options=options,
        text=target.extra_config,
        redacted=_shown(target.extra_config, values, spec.options),
        digest=_digest(target.backend, options, env, instance),
        namespace=namespace,
        instance=instance,
    )
    inside = {key: value for key, value in values.items() if key in KEPT_BACK}
    return Running(config, _knobs(policies, inside, target.knobs))


def live_keys(
    target: TargetState, current: Knobs, text_values: Mapping[str, Any] | None, base: Knobs | None = None
) -> Knobs:
    """Knobs and policies of ``target``: defaults (``base``), then the extra config's, then the request's own.

    ``text_values`` None: the present config stays, and its knobs with it.

    Raises:
        InvalidConfig: an unknown policy or knob, wrong type or range.
    """
    policies = _policies(target, current)
    start = policies if base is None else replace(
        base, prefetch_policy=policies.prefetch_policy, write_policy=policies.write_policy
    )  # fmt: skip
    if text_values is None:
        return _knobs(replace(start, guard=current.guard), _knob_values(current), target.knobs)
    inside = {key: value for key, value in text_values.items() if key in KEPT_BACK}
    return _knobs(start, inside, target.knobs)


def load(text: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The map written in ``text``: JSON, or ``@/path/file.{json,toml,yaml}``.

    Raises:
        InvalidConfig: see ``config_text`` and ``config_source``.
    """
    if text.startswith("@"):
        path = text[1:]
        fmt = config_format(path)
        return parse(read_text(path, env), fmt)
    if not text.strip():
        raise bad("the extra config is empty; leave the field out for no options", "syntax")
    return parse(text, "json")


@lru_cache(maxsize=64)  # evaluating a class's annotations costs more than converting the values
def _names(options: type[BackendOptions]) -> list[str]:
    return sorted(field.encode_name for field in msgspec.structs.fields(options))


def typed_options(values: dict[str, Any], options: type[BackendOptions]) -> BackendOptions:
    """``values`` as the backend's option struct.

    Raises:
        InvalidConfig: unknown key with the nearest known one, wrong type or range with its place.
    """
    known = _names(options)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *KEPT_BACK, INSTANCE], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known) or '(none)'}"
            raise bad(f"unknown option {safe_name(key)}{hint}", "unknown_key", suggestion=near[0] if near else None)
    try:
        return msgspec.convert(values, options, strict=True)
    except msgspec.ValidationError as exc:
        absent = _MISSING.match(str(exc))
        if absent:
            raise bad(f"option {absent[1]!r} must be given", "missing_option") from None
        match = _TYPE_ERROR.match(str(exc))
        # Other texts of msgspec quote the value (F94).
        said, place = (match[1], match[2]) if match else ("Not an allowed value", _place(str(exc)))
    raise bad(f"{said} at {place or '$'}", "bad_type", path=place or "$")


def _place(message: str) -> str | None:
    match = re.search(r" - at (`key` in )?`(\$[^`]*)`$", message)
    return f"{'a key of ' if match[1] else ''}{match[2]}" if match else None


def compare(current: Running, target: Running) -> Difference:
    """What moving from ``current`` to ``target`` means (interface.md, "Same backend again")."""
    live = _changed_live(current.knobs, target.knobs)
    was, will = current.config, target.config
    if was is None and will is None:
        return Difference("live" if live else "same", live)
    if was is None or will is None or was.backend != will.backend:
        relation = "attach" if was is None else "detach" if will is None else "swap"
        return Difference(relation, sorted(["hicache_storage_backend", *live]))
    if was.digest == will.digest and was.namespace == will.namespace:
        return Difference("live" if live else "same", live)
    return Difference("swap", sorted({*_changed_options(was, will), *live}))


def _changed_live(was: Knobs, will: Knobs) -> list[str]:
    names = {"prefetch_policy": "hicache_storage_prefetch_policy", "write_policy": "hicache_write_policy"}
    differ = [f.name for f in fields(Knobs) if f.name != "guard" and getattr(was, f.name) != getattr(will, f.name)]
    guards = [f.name for f in fields(GuardSettings) if getattr(was.guard, f.name) != getattr(will.guard, f.name)]
    return sorted([*(names.get(name, name) for name in differ), *(PREFIX + name for name in guards)])


def _changed_options(was: ResolvedConfig, will: ResolvedConfig) -> list[str]:
    a, b = was.option_values(), will.option_values()
    changed = [key for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
    changed += [INSTANCE] if was.instance != will.instance else []
    if not changed:  # same paths, other contents, or another namespace
        _, files = secret_fields(type(will.options))
        changed = ["namespace"] if was.namespace != will.namespace else sorted(files)
    return changed


# ------------------------------------------------------------------ policies and knobs


def _policies(target: TargetState, current: Knobs) -> Knobs:
    """Default knobs with the target's policies, or the present ones where it is silent. Names are checked (F60)."""
    for key, value, allowed in (
        ("hicache_storage_prefetch_policy", target.prefetch_policy, PREFETCH_POLICIES),
        ("hicache_write_policy", target.write_policy, WRITE_POLICIES),
    ):
        if value is not None and value not in allowed:
            raise bad(f"{key} must be one of {', '.join(allowed)}", "unknown_policy", key=key, allowed=list(allowed))
    return Knobs(
        prefetch_policy=target.prefetch_policy or current.prefetch_policy,
        write_policy=target.write_policy or current.write_policy,
    )


def _knobs(base: Knobs, inside: Mapping[str, Any], over: Mapping[str, Any]) -> Knobs:
    """``base`` with the knobs of the extra config, those with the request's own on top."""
    values = {**inside, **over}
    for key in over:
        if key not in KNOBS:
            near = difflib.get_close_matches(key, KNOBS, n=1)
            raise bad(
                f"unknown knob {safe_name(key)}" + (f"; did you mean {near[0]!r}?" if near else ""),
                "unknown_key",
                suggestion=near[0] if near else None,
            )
    changes: dict[str, Any] = {key: knob(key, value) for key, value in values.items() if key in KNOBS}
    return replace(base, **changes, guard=_guard(base.guard, values))


def _guard(base: GuardSettings, values: Mapping[str, Any]) -> GuardSettings:
    for key in GUARD_KNOBS:
        if key in values:
            try:
                base = changed(base, key, values[key])
            except ValueError as exc:
                said = str(exc)
            else:
                continue
            raise _bad_knob(key, said, values[key])
    return base


def knob(key: str, value: object) -> KnobValue:
    """One prefetch knob, checked; a boolean is no number (F53).

    Raises:
        InvalidConfig: wrong type or range.
    """
    if key == "hicache_storage_pass_prefix_keys":
        if isinstance(value, bool):
            return value
        raise _bad_knob(key, "a boolean", value)
    if key == "prefetch_threshold":
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_THRESHOLD_TOKENS:
            return value
        raise _bad_knob(key, f"an integer from 0 to {MAX_THRESHOLD_TOKENS} (tokens)", value)
    if key == "prefetch_timeout_max" and value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIMEOUT_S:
        return float(value)
    raise _bad_knob(key, f"a number from 0 to {MAX_TIMEOUT_S:.0f} (seconds)", value)


def _bad_knob(key: str, expected: str, value: object) -> InvalidConfig:
    return bad(f"{key} must be {expected}, got {kind(value)}", "bad_knob", key=key)


def _knob_values(knobs: Knobs) -> dict[str, KnobValue]:
    return {key: getattr(knobs, key) for key in KNOBS}


def knob_warnings(knobs: Knobs, l2_tokens: int) -> list[str]:
    """Settings that are allowed and yet switch something off without a word."""
    out = []
    if knobs.prefetch_threshold > l2_tokens:
        out.append(
            f"prefetch_threshold ({knobs.prefetch_threshold} tokens) is above the host pool ({l2_tokens} tokens): "
            "nothing will ever be fetched from storage"
        )
    limit = knobs.prefetch_timeout_max
    if limit is not None and limit < knobs.prefetch_timeout_base:
        out.append("prefetch_timeout_max is below prefetch_timeout_base: every budget is prefetch_timeout_max")
    return out


# ------------------------------------------------------------------ digest and display


def _shown(text: str | None, values: dict[str, Any], options: type[BackendOptions]) -> str | None:
    if text is None or text.startswith("@"):
        return text  # a path, not content
    return redact(text, values, secret_fields(options)[0])


def _digest(backend: str, options: BackendOptions, env: Mapping[str, str], instance: str) -> str:
    """SHA-256 over the canonical effective config; secrets enter through a slow hash."""
    inline, files = secret_fields(type(options))
    values = msgspec.to_builtins(options)
    for name in inline | files:
        if values.get(name):
            content = values[name] if name in inline else read_text(values[name], env, "secret file")
            values[name] = hashlib.pbkdf2_hmac("sha256", content.encode(), name.encode(), _SECRET_ROUNDS).hex()
    whole = {"backend": backend, "options": values, **({INSTANCE: instance} if instance else {})}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
