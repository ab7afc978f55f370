"""What option structs of backends are made of: a base class, sizes with units, marks for secrets.

An option struct is the schema of a backend: unknown keys, wrong types and values out of range are refused by it
before anything is touched (failures.md F53), and ``GET /hicache/backends`` shows it as JSON Schema.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec

from hicache_proto.errors import InvalidConfig

# An inline secret: accepted, hashed into the config's digest, shown nowhere (interface.md, "Backend options").
Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
# The path of a file that holds a secret; the content goes into the digest, the path is shown.
SecretFile = Annotated[str, msgspec.Meta(extra={"secret_file": True})]

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,6})?)\s*(?:([kmgtp])i?b?|b)?\s*", re.IGNORECASE)
MAX_SIZE_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a backend's options are checked against: the rank's pool and its place in the topology."""

    layout: str
    page_bytes: int  # bytes of one page buffer, trailer included
    l2_pages: int  # pages of the host pool
    tp_size: int = 1
    pp_size: int = 1


class BackendOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every option struct. Subclasses declare fields with defaults; both hooks below may raise."""

    def effective(self, env: Mapping[str, str]) -> Self:
        """These options with the environment's values filled in (the option first, then the variable).

        Raises:
            InvalidConfig: a value that must be given is in neither.
        """
        return self

    def check(self, facts: StoreFacts) -> list[str]:
        """Compare with the pools; touch nothing.

        Returns:
            Warnings for the answer.

        Raises:
            InvalidConfig: these options cannot work with these pools (F49).
        """
        return []


def parse_size(value: int | str, name: str) -> int:
    """Bytes of ``value``: an integer, or a string such as ``"10gb"``, ``"1.5 GiB"``; units are powers of 1024.

    Raises:
        InvalidConfig: not a size, negative, or above an exbibyte.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise invalid(name, 'must be a size such as 1073741824 or "10gb"')
        number = float(match[1]) if "." in match[1] else int(match[1])
        size = math.floor(number * _UNITS[(match[2] or "").lower()])
    else:
        size = value
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise invalid(name, "must be a size between 0 and 1 EiB")
    return size


def invalid(name: str, why: str, reason: str = "bad_value", **details: Any) -> InvalidConfig:
    """The error for one option; ``why`` must not quote its value (F94)."""
    return InvalidConfig(f"option {name!r} {why}", details={"reason": reason, "key": name, **details})
