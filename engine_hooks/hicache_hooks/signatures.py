"""Which keywords a method takes, found out once per function: an attach asks for the same few every time, and
``inspect.signature`` costs some 50 us."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def takes(method: Callable[..., Any], keyword: str) -> bool:
    """True when ``method`` has a parameter of that name.

    Raises:
        ValueError, TypeError: it has no signature, as some native functions.
    """
    function = getattr(method, "__func__", method)
    try:
        return keyword in _parameters(function)
    except TypeError:  # not hashable
        return keyword in inspect.signature(function).parameters


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
