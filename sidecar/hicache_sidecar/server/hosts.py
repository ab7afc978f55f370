"""Which ``Host`` and ``Origin`` headers a request may carry.

A web page that an operator visits can make the operator's browser send requests to 127.0.0.1, and with DNS rebinding
even read the answers. Both attacks need a foreign name in ``Host`` or ``Origin``, so only names that this server is
bound to are let in: loopback names on a loopback address, the address that the connection arrived at, and what
``http.allowed_hosts`` adds.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from hicache_proto.errors import Forbidden

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORT = {"http": 80, "https": 443}


class Hosts:
    """The rule for one server."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """Args: allowed: ``name`` (any port) or ``name:port``."""
        self._allowed = frozenset(_split(entry) for entry in allowed)

    def check(self, host: str | None, origin: str | None, local: tuple[str, int] | None) -> None:
        """Let the request pass or refuse it.

        Args:
            host, origin: the headers, None when absent.
            local: address and port that the connection arrived at.

        Raises:
            Forbidden: ``details.reason`` is ``host`` or ``origin``.
        """
        if host is None or not self._known(*_split(host), local):
            raise Forbidden(
                "the Host header names nothing that this server is bound to",
                details={"reason": "host"},
                hint="use the address of the server, or add the name to http.allowed_hosts",
            )
        if origin is not None and not self._known_origin(origin, local):
            raise Forbidden("requests of foreign web pages are refused", details={"reason": "origin"})

    def _known_origin(self, origin: str, local: tuple[str, int] | None) -> bool:
        try:
            parts = urlsplit(origin)
            port = parts.port or _DEFAULT_PORT.get(parts.scheme)
        except ValueError:
            return False
        return parts.hostname is not None and self._known(parts.hostname, port, local)

    def _known(self, name: str, port: int | None, local: tuple[str, int] | None) -> bool:
        name = _plain(name)
        if (name, None) in self._allowed or (name, port) in self._allowed:
            return True
        if local is None:
            return False
        address, local_port = _plain(local[0]), local[1]
        if (port or 80) != local_port:
            return False
        return name == address or (name in _LOOPBACK_NAMES and is_loopback(address))


def is_loopback(address: str) -> bool:
    """True for an IP literal of the loopback network, mapped IPv4 included."""
    try:
        ip = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _split(host: str) -> tuple[str, int | None]:
    """``name[:port]``, ``[v6][:port]``. A port that is no number makes a name that nothing matches."""
    host = host.strip()
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else rest
    elif host.count(":") == 1:
        name, _, port = host.partition(":")
    else:
        name, port = host, ""
    if port and not (port.isascii() and port.isdecimal()):
        return host, -1
    return _plain(name), int(port) if port else None


def _plain(name: str) -> str:
    """Lower case, without the root's dot; IP literals in their one canonical form."""
    name = name.lower().rstrip(".")
    try:
        ip = ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return name
    return str(getattr(ip, "ipv4_mapped", None) or ip)
