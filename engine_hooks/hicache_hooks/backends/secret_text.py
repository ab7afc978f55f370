"""Reading one secret: the option, else the file that another option names, else a variable. Never logged (F94)."""

from collections.abc import Mapping
from typing import Any

from hicache_hooks.cache.config_source import read_text


def secret_of(options: Any, name: str, env: Mapping[str, str], variable: str = "") -> str:
    """The secret ``name`` of an option struct, or an empty string.

    Raises:
        InvalidConfig: the file of ``<name>_file`` cannot be read or is not allowed.
    """
    inline = getattr(options, name, None)
    if inline:
        return str(inline)
    path = getattr(options, f"{name}_file", None)
    if path:
        return read_text(path, env, "secret file").strip("\r\n")
    return env.get(variable, "") if variable else ""
