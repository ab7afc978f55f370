"""The daemon's configuration as types. ``config.py`` fills them; nothing here reads a file or the environment.

Durations are seconds as numbers, or strings with a unit: ``"250ms"``, ``"5s"``, ``"2m"``, ``"1h"``.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hicache_proto.hooklink import HEARTBEAT_S, LIVENESS_S
from hicache_proto.transaction import FREEZE_S, IN_DOUBT_S, PREPARED_S

DEFAULT_RUNTIME_DIR = "/run/hicache-sidecar"
DEFAULT_STATE_DIR = "/var/lib/hicache-sidecar"
DEFAULT_HTTP = "127.0.0.1:30080"

RoleName = Literal["viewer", "operator", "admin"]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Octal = Annotated[str, Meta(pattern=r"^0?[0-7]{3}$", description='Permission bits, such as "0660".')]
# No wildcard, no scheme: neither would ever match, and nobody would be told.
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:\[\]%-]+$", description="A name, or name:port.")]

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*$")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: an unknown key is an error."""


class Http(_Section, frozen=True):
    """The HTTP admin API."""

    listen: str = DEFAULT_HTTP  # host:port; "" turns HTTP off
    token_file: str | None = None
    viewer_token_file: str | None = None
    allowed_hosts: list[HostName] = []


class Control(_Section, frozen=True):
    """``control.sock``. Who may do what is decided by uid; the mode only says who may knock."""

    mode: Octal = "0660"
    group: str | None = None


class Hooks(_Section, frozen=True):
    """``hooks.sock``, where the engines connect."""

    mode: Octal = "0660"
    group: str | None = None
    users: list[str] = []  # whose processes may connect, beside root and the daemon's own user
    heartbeat_s: Seconds = HEARTBEAT_S
    liveness_s: Seconds = LIVENESS_S


class AccessTable(_Section, frozen=True):
    """Roles by user and by group; root and the daemon's own user are admin."""

    users: dict[str, RoleName] = {}
    groups: dict[str, RoleName] = {}


class Leases(_Section, frozen=True):
    """How long a rank holds what nobody renews (design.md, "The transaction")."""

    prepared_s: Seconds = PREPARED_S
    freeze_s: Seconds = FREEZE_S
    in_doubt_s: Seconds = IN_DOUBT_S


class Log(_Section, frozen=True):
    """``[log]``: least level, and form; ``auto`` is the journal's form under systemd."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "journal", "human", "json"] = "auto"


class Settings(_Section, frozen=True):
    """Everything that can be set."""

    runtime_dir: str = DEFAULT_RUNTIME_DIR
    state_dir: str = DEFAULT_STATE_DIR
    engine_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None  # None: the first hello binds it
    on_engine_restart: Literal["reattach", "leave"] = "reattach"
    faults: list[str] = []  # fault points by name, for tests; off unless named
    http: Http = Http()
    control: Control = Control()
    hooks: Hooks = Hooks()
    access: AccessTable = AccessTable()
    leases: Leases = Leases()
    log: Log = Log()

    @property
    def control_path(self) -> Path:
        """Public path of the control socket."""
        return Path(self.runtime_dir) / "control.sock"


def seconds_of(value: object) -> object:
    """A duration string as seconds; anything else is returned as it is, for the type check to judge."""
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match:
            return float(match[1]) * _UNIT_S[match[2]]
    return value


def split_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: no port, or one out of range.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [::1]:30080")
    if not host:
        raise ValueError(f"{text!r} names no host: 127.0.0.1:{port} is loopback, 0.0.0.0:{port} is every address")
    return host, int(port)
