"""Known backends by name. A module is imported only when its backend is asked for.

Each backend module carries one ``SPEC``; adding a backend is that module and one line here.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from hicache_hooks.backends.base import Backend, Manifest, StoreContext
from hicache_hooks.backends.options import BackendOptions
from hicache_proto.errors import BackendUnavailable, UnknownBackend

UNKNOWN_INNER = "unknown"


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What the attach path needs of a backend module.

    ``missing`` names packages, libraries or devices that are absent on this host; ``manifest`` may depend on the
    options (dynamic classes bring their own); ``create`` constructs and does no I/O; ``inner`` is the vendor's
    connector behind one name (F75), for a store whose health does not say: empty where there is none.
    """

    manifest: Callable[[Any, Mapping[str, str]], Manifest]
    options: type[BackendOptions]
    create: Callable[[Any, StoreContext, Mapping[str, str]], Backend]
    missing: Callable[[], list[str]]
    layouts: tuple[str, ...]
    notes: tuple[str, ...] = ()
    inner: Callable[[Any], str] = lambda options: ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the registry."""

    name: str
    module: str

    def load(self) -> BackendSpec:
        """The backend's spec.

        Raises:
            BackendUnavailable: its module cannot be imported here; names what is missing.
        """
        try:
            spec = importlib.import_module(self.module).SPEC
        except ImportError as exc:
            missing = exc.name or "a module"
        else:
            return spec  # type: ignore[no-any-return]
        raise BackendUnavailable(
            f"backend {self.name!r} needs {missing!r}, which is not installed here", details={"missing": [missing]}
        )


_PACKAGE = "hicache_hooks.backends"
KNOWN: dict[str, Entry] = {
    name: Entry(name, f"{_PACKAGE}.{module}")
    for name, module in (
        ("aibrix", "aibrix"),
        ("dynamic", "dynamic"),
        ("eic", "eic"),
        ("file", "file"),
        ("hf3fs", "hf3fs"),
        ("mooncake", "mooncake"),
        ("nixl", "nixl"),
        ("redis", "redis"),
    )
}


def entry(name: str) -> Entry:
    """The registry's line for ``name``.

    Raises:
        UnknownBackend: there is none in this release; lists those that are.
    """
    found = KNOWN.get(name)
    if found is None:
        known = list(KNOWN)
        shown = repr(name) if name.isascii() and name.isidentifier() and len(name) <= 40 else "of that name"
        raise UnknownBackend(
            f"no backend {shown} in this release; known are {', '.join(known)}", details={"known": known}
        )
    return found


def usable(name: str) -> BackendSpec:
    """The spec of a backend that can be used on this host.

    Raises:
        UnknownBackend, BackendUnavailable: see ``entry`` and ``Entry.load``; something it needs is missing.
    """
    spec = entry(name).load()
    missing = spec.missing()
    if missing:
        raise BackendUnavailable(
            f"backend {name!r} is not usable here: {', '.join(missing)}", details={"missing": missing}
        )
    return spec


def describe() -> list[dict[str, Any]]:
    """Known backends for ``GET /hicache/backends``, sorted by name."""
    return [_describe(item) for item in KNOWN.values()]


def _describe(item: Entry) -> dict[str, Any]:
    try:
        spec = item.load()
    except BackendUnavailable as exc:
        return {
            "name": item.name, "available": False, "missing": exc.details["missing"], "layouts": [],
            "manifest": None, "options_schema": None, "notes": [exc.message],
        }  # fmt: skip
    missing = spec.missing()
    return {
        "name": item.name,
        "available": not missing,
        "missing": missing,
        "layouts": list(spec.layouts),
        "manifest": _manifest(spec),
        "options_schema": _schema(spec.options),
        "notes": list(spec.notes),
    }


def _manifest(spec: BackendSpec) -> dict[str, Any] | None:
    """What it is good for with default options (F76). None: only an attach can tell, as of a dynamic class."""
    options: BackendOptions | None = None
    with suppress(TypeError):  # some options have no default
        options = spec.options()
    try:
        found = spec.manifest(options, {})
    except Exception:
        return None
    return {
        "alignment": found.alignment,
        "needs_registration": found.needs_registration,
        "shared": found.shared,
        "parallel_axes": list(found.parallel_axes),
        "summary": found.summary,
    }


def _schema(options: type[BackendOptions]) -> dict[str, Any]:
    """A self-contained JSON Schema: the struct's own object at the top, nested ones under ``$defs``."""
    schema = msgspec.json.schema(options)
    defs = dict(schema.get("$defs", {}))
    top = dict(defs.pop(options.__name__, schema))
    return {**top, "$defs": defs} if defs else top
