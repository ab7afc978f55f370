"""The part of the configuration that a SIGHUP changes while the daemon runs: who may do what.

Roles, tokens, host names and the log level are read anew; everything else needs a restart, and a reload that cannot be
used changes nothing.
"""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from hicache_sidecar.daemon.config import ConfigError
from hicache_sidecar.daemon.settings import Settings, split_address
from hicache_sidecar.obs import logging as obs_logging
from hicache_sidecar.server.actors import Access, gid_of, parse_access, uid_of
from hicache_sidecar.server.auth import TokenError, Tokens
from hicache_sidecar.server.hosts import Hosts, is_loopback

log = logging.getLogger("hicache.daemon")

_RELOADED = ("http", "access", "log")


class Live:
    """Access rules in force. The transports ask for them per connection and per request."""

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError, TokenError."""
        self.settings = settings
        self.access, self.tokens, self.hosts = resolve(settings)

    def reload(self, read: Callable[[], Settings]) -> bool:
        """Read the configuration again. False: it was refused, and the log says why."""
        try:
            settings = read()
            access, tokens, hosts = resolve(settings)
            if self.tokens.required and not tokens.required:
                raise ConfigError("the HTTP token is gone: dropping it needs a restart")
        except (ConfigError, TokenError) as exc:
            log.error("reload refused, nothing changed: %s", exc)
            return False
        fixed = [key for key in _changed(self.settings, settings) if key not in _RELOADED]
        if settings.http.listen != self.settings.http.listen:
            fixed.append("http.listen")
        if fixed:
            log.warning("reload: changed, but in force only after a restart: %s", ", ".join(fixed))
        self.settings, self.access, self.tokens, self.hosts = settings, access, tokens, hosts
        obs_logging.setup(settings.log.level, settings.log.format)
        log.info("reload: access, tokens and log level are as configured")
        return True


def resolve(settings: Settings) -> tuple[Access, Tokens, Hosts]:
    """Names to numbers, files to digests.

    Raises:
        ConfigError: an unknown user or group.
        TokenError: a token file cannot be used.
    """
    try:
        access = parse_access(settings.access.users, settings.access.groups)
    except ValueError as exc:
        raise ConfigError(f"access: {exc}") from None
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    tokens = Tokens.load(
        _path(settings.http.token_file),
        _path(settings.http.viewer_token_file),
        Path(credentials) if credentials else None,
    )
    return access, tokens, Hosts(settings.http.allowed_hosts)


def check(settings: Settings) -> None:
    """What ``--check`` asks beyond the file: that users, groups, tokens and the address would do at a start.

    Raises:
        ConfigError, TokenError: a start would be refused.
    """
    _, tokens, _ = resolve(settings)
    for key, find, names in (
        ("control.group", gid_of, [settings.control.group]),
        ("hooks.group", gid_of, [settings.hooks.group]),
        ("hooks.users", uid_of, settings.hooks.users),
    ):
        try:
            for name in names:
                if name:
                    find(name)
        except ValueError as exc:
            raise ConfigError(f"{key}: {exc}") from None
    if settings.http.listen and not tokens.required:
        host, port = split_address(settings.http.listen)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise ConfigError(f"http.listen {host}: {exc.strerror or exc}") from None
        if not all(is_loopback(str(entry[4][0])) for entry in found):
            raise ConfigError(f"http.listen {host} can be reached from other hosts: set http.token_file")


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _changed(old: Settings, new: Settings) -> list[str]:
    return [
        field.name for field in msgspec.structs.fields(Settings) if getattr(old, field.name) != getattr(new, field.name)
    ]
