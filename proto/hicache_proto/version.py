"""Protocol version exchange, one number for both links.

Each side names its version in its first message. A peer one version older is understood; anything else
is refused by number, so that an operator reads which side to upgrade. Version 0 was the draft of
version 1 and has the same messages.
"""

from hicache_proto.errors import InvalidRequest

PROTOCOL_VERSION = 1


def negotiate(peer: int, own: int = PROTOCOL_VERSION) -> int:
    """Return the version to speak with ``peer``.

    Raises:
        InvalidRequest: the peer is newer than us, or more than one version older.
    """
    if own - 1 <= peer <= own:
        return peer
    raise InvalidRequest(
        f"protocol version {peer} is not understood: this side speaks {own} and {own - 1}",
        details={"reason": "protocol_version", "peer": peer, "own": own},
        hint="install the same release of hicache-sidecar on both sides",
    )
