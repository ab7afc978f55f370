"""Wire types, errors, framing and the transaction table shared by the client, the sidecar and the hooks.

Imports msgspec and the standard library only: the client and the hooks inside the engine both load it.
"""

__version__ = "0.1.0"
