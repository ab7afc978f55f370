"""The seam at the engine's backend factory: hands over what PREPARE built, and guards all that the engine builds.

COMMIT runs the engine's own attach, which calls its factory on the scheduler thread. Around that call stands
``create_backend``: when an object was offered on this thread it is returned, once, and nothing is constructed; any
other call (PREPARE itself, the engine's start, its own PUT) goes to the engine's factory, and its result is wrapped
in our guard, so that every backend of the process is guarded from its first call on.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hicache_hooks.sglang.storage_guard import guard_storage

log = logging.getLogger(__name__)

_here = threading.local()


@contextmanager
def offer(backend: Any) -> Iterator[None]:
    """Inside, on this thread, the next ``create_backend`` returns ``backend``."""
    _here.offered = backend
    try:
        yield
    finally:
        _here.offered = None


def create_backend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of the factory's class method: ``args[0]`` is the class."""
    offered = getattr(_here, "offered", None)
    if offered is not None:
        _here.offered = None
        return offered
    built = original(*args, **kwargs)
    try:
        return guard_storage(built, name=str(args[1] if len(args) > 1 else kwargs.get("backend_name", "")))
    except Exception:
        log.exception("the guard could not be put around %s; it is used as it is", type(built).__name__)
        return built


class KeepOpen:
    """Stands in for the backend while the engine detaches: it has no ``close``, so nothing is closed."""
