"""Backend ``dynamic``: a class named in the request, taken only from the engine's allow-list (F18).

``HICACHE_DYNAMIC_BACKENDS`` = ``module:Class`` list with commas, in the engine's environment. A module that is not on
it is never imported. Contract, version 1: ``Class(options: dict, context: StoreContext)`` does no I/O, and has the
methods of ``base.Backend``. Both are checked by inspection before the constructor runs (F15). A class without a
``manifest`` gets the most restrictive one (F76).
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

from hicache_hooks.backends.base import Backend, Manifest, StoreContext
from hicache_hooks.backends.options import BackendOptions
from hicache_hooks.backends.registry import UNKNOWN_INNER, BackendSpec
from hicache_proto.errors import Forbidden, InvalidConfig
from hicache_proto.model import LAYOUTS

ALLOW_ENV = "HICACHE_DYNAMIC_BACKENDS"
CONTRACT_VERSION = 1
# Method -> number of arguments that the engine passes.
REQUIRED_METHODS = {
    "open": 0, "register": 1, "batch_put": 2, "batch_get": 2, "batch_exists": 1, "delete": 1, "set_aside": 2,
    "clear": 0, "health": 0, "close": 0,
}  # fmt: skip
OPTIONAL_METHODS = {"epoch": 0, "confirm": 1, "forget": 0}
TOGETHER = ("confirm", "forget")  # a memory that nothing corrects would hide for ever that the content is gone (F70)
_RESTRICTIVE = Manifest(
    name="dynamic", layouts=("page_first",), alignment=4096, shared=False, summary="no manifest: most restrictive"
)


class DynamicOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``dynamic``; ``options`` goes to the class as it is."""

    module_path: Annotated[str, msgspec.Meta(description="module that holds the class", min_length=1)]
    class_name: Annotated[str, msgspec.Meta(description="name of the class", min_length=1)]
    backend_name: Annotated[str, msgspec.Meta(description="what status calls it")] = ""
    options: Annotated[dict[str, Any], msgspec.Meta(description="first argument of the constructor")] = msgspec.field(
        default_factory=dict
    )

    def effective(self, env: Mapping[str, str]) -> Self:
        """Refuse what is not allow-listed, before anything could import it.

        Raises:
            Forbidden: reason ``not_allowlisted``.
        """
        require_allowed(self, env)
        return self


def allowed(env: Mapping[str, str]) -> frozenset[str]:
    """The allow-list: exact ``module:Class`` names."""
    return frozenset(filter(None, (item.strip() for item in env.get(ALLOW_ENV, "").split(","))))


def require_allowed(options: DynamicOptions, env: Mapping[str, str]) -> None:
    """Raise ``Forbidden`` unless the class is on the list. The error does not repeat the list."""
    if f"{options.module_path}:{options.class_name}" not in allowed(env):
        raise Forbidden(
            f"this class is not in {ALLOW_ENV} of the engine's environment", details={"reason": "not_allowlisted"}
        )


def load_class(options: DynamicOptions, env: Mapping[str, str]) -> type[Backend]:
    """Import an allow-listed class and check it against the contract. Constructs nothing.

    Raises:
        Forbidden: not allow-listed; nothing was imported.
        InvalidConfig: it cannot be imported, or does not keep the contract (``details.missing``, ``details.problems``).
    """
    require_allowed(options, env)
    failed = ""
    found: object = None
    try:
        found = getattr(importlib.import_module(options.module_path), options.class_name)
    except BaseException as exc:  # module code may raise anything, SystemExit too; its text may hold anything (F94)
        failed = type(exc).__name__
    if failed:
        raise _broken(f"the class cannot be imported: {failed}", [], [])
    if not isinstance(found, type):
        raise _broken("the name is not a class", [], [])
    missing, problems = contract_gaps(found)
    if missing or problems:
        raise _broken("the class does not keep the backend contract", missing, problems)
    return found


def contract_gaps(cls: type) -> tuple[list[str], list[str]]:
    """Missing methods, and what else is wrong with a backend class (F15)."""
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(cls, name, None))]
    missing += [name for name in sorted(getattr(cls, "__abstractmethods__", ())) if name not in missing]
    problems = []
    version = getattr(cls, "contract", CONTRACT_VERSION)
    if version != CONTRACT_VERSION:
        problems.append(f"contract version {version!r}, this engine has {CONTRACT_VERSION}")
    if not _takes(cls, 2):
        problems.append("constructor does not take (options, context)")
    for name, arguments in (REQUIRED_METHODS | OPTIONAL_METHODS).items():
        method = getattr(cls, name, None)
        if callable(method) and not _takes(method, arguments + 1):
            problems.append(f"{name} does not take {arguments} arguments")
        elif name in OPTIONAL_METHODS and method is not None and not callable(method):
            problems.append(f"{name} is not a method")
    if len({callable(getattr(cls, name, None)) for name in TOGETHER}) > 1:
        problems.append(f"{' and '.join(TOGETHER)} come together or not at all")
    manifest = getattr(cls, "manifest", None)
    if manifest is not None and not isinstance(manifest, Manifest):
        problems.append("manifest is not a Manifest")
    return missing, problems


def _takes(function: Any, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # native code without a signature: only a call can tell
        return True
    return True


def _broken(message: str, missing: list[str], problems: list[str]) -> InvalidConfig:
    return InvalidConfig(
        message
        + (f"; missing: {', '.join(missing)}" if missing else "")
        + (f"; {'; '.join(problems)}" if problems else ""),
        details={"reason": "backend_contract", "missing": missing, "problems": problems},
    )


def manifest_of(options: DynamicOptions, env: Mapping[str, str]) -> Manifest:
    """The class's manifest, or the most restrictive one.

    Raises:
        Forbidden, InvalidConfig: see ``load_class``.
    """
    return getattr(load_class(options, env), "manifest", None) or _RESTRICTIVE


def create(options: DynamicOptions, context: StoreContext, env: Mapping[str, str]) -> Backend:
    """Construct the class, checked once more.

    Raises:
        Forbidden, InvalidConfig: see ``load_class``; and whatever the constructor raises.
    """
    cls: Any = load_class(options, env)
    made: Backend = cls(dict(options.options), context)
    return made


SPEC = BackendSpec(
    manifest=manifest_of,
    options=DynamicOptions,
    create=create,
    missing=list,
    layouts=LAYOUTS,
    notes=(f"classes come only from {ALLOW_ENV} of the engine's environment",),
    inner=lambda options: UNKNOWN_INNER,  # a foreign class: only it knows what stores the pages
)
