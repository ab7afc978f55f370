"""The extra config's ``instance``: a name of the operator's own that tells two stores of one kind apart (F92).

It becomes part of a metric label and of a line in status, so its characters and its length are bounded, and a process
remembers a bounded number of names (``embedded/usage.py``). The backend does not see it.
"""

import re
from collections.abc import Mapping
from typing import Any

from hicache_hooks.cache.config_text import bad

INSTANCE = "instance"
MAX_LENGTH = 32
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_LENGTH - 1}}}")


def instance_of(values: Mapping[str, Any]) -> str:
    """The name in ``values``; "" when there is none.

    Raises:
        InvalidConfig: reason ``bad_instance``; the value is not repeated.
    """
    value = values.get(INSTANCE, "")
    if value == "" and INSTANCE not in values:
        return ""
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise bad(
            f"{INSTANCE} must be 1 to {MAX_LENGTH} letters, digits, '_', '.' or '-', beginning with a letter or digit",
            "bad_instance",
            key=INSTANCE,
        )
    return value
