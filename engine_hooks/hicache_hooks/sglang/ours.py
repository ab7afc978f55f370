"""Whether the engine's own attach, detach or clear runs because of us (then it is no drift).

The engine's handlers are the same for its own HTTP calls and for our COMMIT. What notices changes behind our back
(``drift``) asks here. The mark belongs to the thread, so that a call of the engine's own on another thread is not
hidden by ours.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def ours() -> Iterator[None]:
    """Inside, what the engine changes is changed by us. Nests."""
    depth = getattr(_here, "depth", 0)
    _here.depth = depth + 1
    try:
        yield
    finally:
        _here.depth = depth


def is_ours() -> bool:
    """True inside ``ours()`` on this thread."""
    return getattr(_here, "depth", 0) > 0
