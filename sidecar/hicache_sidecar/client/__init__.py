"""The tiny client: blocking sockets, msgspec, nothing else.

    from hicache_sidecar.client import Client

    with Client.connect() as client:
        print(client.status().state)

Names load on first use, so that ``hicachectl status`` does not pay for the typed half.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_sidecar.client.connection import Connection as Connection
    from hicache_sidecar.client.connection import default_socket_path as default_socket_path
    from hicache_sidecar.client.errors import ClientError as ClientError
    from hicache_sidecar.client.errors import ConnectionLost as ConnectionLost
    from hicache_sidecar.client.errors import Unreachable as Unreachable
    from hicache_sidecar.client.typed import Client as Client

_HOMES = {
    "Client": "typed",
    "ClientError": "errors",
    "Connection": "connection",
    "ConnectionLost": "errors",
    "Unreachable": "errors",
    "default_socket_path": "connection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
