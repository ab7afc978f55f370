"""What a refused value or key might have been: msgspec names the place, this adds what may stand there (F60).

``msgspec.ValidationError`` says ``Invalid enum value 'write-through' - at `$.hicache_write_policy```; an operator needs
the list. Found by walking the type that was decoded along the path. Pure.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect

_PLACE = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_STEP = re.compile(r"\.(?P<field>[^.\[\]]+)|\[(?:\.\.\.|\d+)\]")
_WRONG_VALUE = "Invalid enum value"


def explain(exc: msgspec.ValidationError, decoded: Any) -> tuple[str, dict[str, Any]]:
    """The text of ``exc`` and details for an error body.

    Args:
        decoded: the type that was being decoded, as given to msgspec.

    Returns:
        ``(message, details)``; details are ``{field, allowed}`` where a fixed set of values was asked for, and
        ``{field, suggestion}`` where a key was nearly a known one, else empty.
    """
    text = str(exc)
    unknown, place = _UNKNOWN.match(text), _PLACE.search(text)
    if unknown is None and not (place and text.startswith(_WRONG_VALUE)):
        return text, {}
    steps = [step["field"] for step in _STEP.finditer(place["path"] if place else "")]
    found = list(_at(msgspec.inspect.type_info(decoded), steps))
    if unknown is not None:
        return _nearest(text, unknown["name"], found)
    allowed = sorted({value for kind in found for value in _values(kind)})
    if not allowed:
        return text, {}
    field = next((step for step in reversed(steps) if step is not None), "")
    return f"{text}; one of {', '.join(allowed)}", {"field": field, "allowed": allowed}


def _at(info: msgspec.inspect.Type, steps: list[str | None]) -> Iterator[msgspec.inspect.Type]:
    """Every type that may stand at the end of ``steps`` (None: an item of a list, or a value of a map)."""
    if isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from _at(member, steps)
    elif isinstance(info, msgspec.inspect.Metadata):
        yield from _at(info.type, steps)
    elif not steps:
        yield info
    elif isinstance(info, msgspec.inspect.StructType):
        for field in info.fields:
            if field.encode_name == steps[0]:
                yield from _at(field.type, steps[1:])
    elif isinstance(info, msgspec.inspect.DictType):
        yield from _at(info.value_type, steps[1:])
    elif isinstance(info, msgspec.inspect.CollectionType):
        yield from _at(info.item_type, steps[1:])


def _nearest(text: str, name: str, found: list[msgspec.inspect.Type]) -> tuple[str, dict[str, Any]]:
    known = {f.encode_name for info in found if isinstance(info, msgspec.inspect.StructType) for f in info.fields}
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return (f"{text}; did you mean {near[0]}?", {"field": name, "suggestion": near[0]}) if near else (text, {})


def _values(info: msgspec.inspect.Type) -> list[str]:
    return [str(value) for value in info.values] if isinstance(info, msgspec.inspect.LiteralType) else []
