"""Answers of backends: their shape is checked and counted here. Pure."""

from collections.abc import Callable, Sequence

from hicache_hooks.backends.base import Got

GOT = {item.value: item for item in Got}  # a look-up: making an enum's member costs some 300 ns a key


def check_shape(out: object, keys: int, valid: Callable[[object], bool]) -> None:
    """One result per key, each valid.

    Raises:
        TypeError: another shape.
    """
    if not isinstance(out, list) or len(out) != keys or not all(valid(item) for item in out):
        raise TypeError("a backend answered with another shape than one result per key")


def is_bool(item: object) -> bool:
    """A truth value, numpy's too."""
    return isinstance(item, bool) or type(item).__name__ in ("bool", "bool_")


def is_put(item: object) -> bool:
    """A result of a write: a truth value, or None for a key that failed."""
    return item is None or is_bool(item)


def is_got(item: object) -> bool:
    """A result of a read, as the enum or its text."""
    return item in GOT


def counted_bytes(pages: Sequence[memoryview], counted: Sequence[bool]) -> int:
    """Bytes of the pages that count."""
    return sum(page.nbytes for page, yes in zip(pages, counted, strict=True) if yes)


def errors(got: Sequence[Got]) -> int:
    """Keys of a read that failed alone."""
    return got.count(Got.ERROR)


def put_errors(done: Sequence[bool | None]) -> int:
    """Keys of a write that failed alone."""
    return done.count(None)
