"""What of a config may be shown: secrets replaced, everything else as the caller wrote it (F94).

A value is secret when the backend's option struct marks it so, when its name says so (``password``, ``secret_key``;
needed for dynamic backends, whose options nobody declared), or when it stands in a URL (user part, query) or a
connection string.
"""

import functools
import json
import re
from collections.abc import Collection
from typing import Any

import msgspec

from hicache_proto.secret_names import is_secret_name

MASK = "***"
# key=value inside a string: connection strings, URL queries. Masking too much is harmless.
_ASSIGNED = re.compile(r"(?i)((?:password|passwd|secret|token|key)=)[^&;,\s]+")
_USERINFO = re.compile(r"(?<=://)([^/?#\s@:]*:)?[^/?#\s@]+(?:@[^/?#\s@]*)*(?=@)")  # a password may hold an @


def redact(text: str, values: dict[str, Any], secret_names: Collection[str] = ()) -> str:
    """``text`` itself when ``values``, parsed from it, hold no secret; else the values as JSON, secrets masked."""
    clean = _redacted(values, frozenset(secret_names))
    return text if clean == values else json.dumps(clean, ensure_ascii=False)


@functools.cache
def secret_fields(options: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the fields that an option struct marks as inline secrets, and as files that hold one."""
    info = msgspec.inspect.type_info(options)
    inline, files = set(), set()
    for field in getattr(info, "fields", ()):
        marks = _marks(field.type)
        if "secret" in marks:
            inline.add(field.encode_name)
        if "secret_file" in marks:
            files.add(field.encode_name)
    return frozenset(inline), frozenset(files)


def _marks(kind: Any) -> set[str]:
    found = set(getattr(kind, "extra", None) or ())
    for inner in getattr(kind, "types", ()):
        found |= _marks(inner)
    inner = getattr(kind, "type", None)
    return found | _marks(inner) if inner is not None else found


def _redacted(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: MASK if (key in names or is_secret_name(key)) and _holds(item) else _redacted(item, names)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, names) for item in value]
    if isinstance(value, str):
        return _ASSIGNED.sub(r"\1" + MASK, _USERINFO.sub(lambda m: (m[1] or "") + MASK, value))
    return value


def _holds(item: Any) -> bool:
    return item is not None and item != "" and not isinstance(item, bool)
