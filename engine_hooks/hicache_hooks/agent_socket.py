"""The agent's DEALER socket and its monitor: made, watched and closed together.

IMMEDIATE=1 makes the socket writable only when a peer is there, so nothing old waits for a new sidecar (rule 5);
every linger is bounded, so that ending the context cannot hang (F103).
"""

import zmq
from zmq.utils.monitor import parse_monitor_message

from hicache_proto.hooklink import MAX_LINK_BYTES

SOCKET_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IMMEDIATE, 1),
    (zmq.MAXMSGSIZE, MAX_LINK_BYTES),
    (zmq.RECONNECT_IVL, 100),  # ms
    (zmq.RECONNECT_IVL_MAX, 1000),  # ms
    (zmq.SNDHWM, 256),
)


class AgentSocket:
    """One connection's socket. For the agent thread alone."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.monitor: zmq.Socket[bytes] | None = None

    def connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        """Set the options, watch, connect; returns the monitor.

        Raises:
            zmq.ZMQError: an endpoint that ZMQ does not take, or no descriptor left. Call ``close`` all the same.
        """
        for option, value in SOCKET_OPTIONS:
            self.dealer.setsockopt(option, value)
        self.monitor = monitor = self.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(endpoint)
        return monitor

    def disconnected(self) -> bool:
        """True when the connection was lost since the last look."""
        while self.monitor is not None:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return False
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return True
        return False

    def close(self, linger_ms: int) -> None:
        """Close both; what is still unsent may go out for ``linger_ms``."""
        if self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close(linger=0)
        self.dealer.close(linger=linger_ms)
