"""Mooncake's clients between two attaches: kept instead of closed, since a close stalls the whole engine.

Measured with 0.3.13: ``close()`` joins two threads that sleep for a second each, and holds the GIL until they wake (0.9
to 2.9 s; deleting the client does the same). What a detach has to give back is the memory that the engine contributes.
A segment that was mounted after the set-up can be unmounted and freed by itself: 2 ms, 4.5 s beside a dead master, and
the GIL is left to others; the master forgets its pages at once. So the set-up contributes nothing, the segment is
mounted after it, a detach unmounts it, and the client waits for the next attach to the same master. It keeps its local
buffer (16 MiB), some 25 threads and a heartbeat until the engine ends. A set-up for another master adds another
client; above ``MAX_KEPT`` the oldest is closed.

Where the segment is the set-up's own (SSD offload, versions without the calls) the client is closed as before.
"""

import json
import logging
import os
import threading
from typing import Any

from hicache_hooks.backends import mooncake_client
from hicache_hooks.backends.mooncake_client import REAPER, answers
from hicache_hooks.backends.mooncake_options import MooncakeOptions
from hicache_proto.errors import PrepareFailed

log = logging.getLogger(__name__)

MAX_KEPT = 2  # a swap between two stores of one master uses two at a time
_CALLS = ("allocate_and_mount_segment", "unmount_and_free_segment")


class Client:
    """A client that is set up, and the segments that it contributes. ``api`` is the vendor's object."""

    def __init__(self, api: Any, key: str, address: str) -> None:
        """``key`` "": it is closed, not kept."""
        self.api = api
        self.key = key
        self._address = address
        self._segments: list[str] = []

    def alive(self) -> bool:
        """True when the master answers; leaves the GIL to others. Never raises."""
        try:
            return answers(self._address) and self.api.is_exist("hicache-alive") in (0, 1)
        except Exception:  # the vendor's own
            return False

    def mount(self, nbytes: int, protocol: str) -> None:
        """Contribute memory.

        Raises:
            PrepareFailed: reason ``setup_failed``.
        """
        if not nbytes:
            return
        found = self.api.allocate_and_mount_segment(nbytes, protocol)
        if found["ret"]:
            raise PrepareFailed(
                f"Mooncake could not contribute a segment: {found['ret']}",
                details={"reason": "setup_failed", "code": int(found["ret"])},
            )
        self._segments = list(found["segment_ids"])

    def end(self) -> None:
        """Take the segments back, and keep the client or close it. The master has just answered."""
        segments, self._segments = self._segments, []
        code = self.api.unmount_and_free_segment(segments) if segments else 0
        if self.key and not code:
            KEPT.give(self)
            return
        if code:
            log.warning("mooncake: a segment could not be unmounted (%s): its client is closed", code)
        self.api.close()


class Kept:
    """Clients without a store. Thread-safe; a forked child finds none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: list[Client] = []
        self._pid = os.getpid()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._clients) if self._pid == os.getpid() else 0

    def give(self, client: Client) -> None:
        """Keep it; one that is too many is closed when its master answers."""
        with self._lock:
            if self._pid != os.getpid():
                self._clients, self._pid = [], os.getpid()
            self._clients.append(client)
            dropped = self._clients.pop(0) if len(self._clients) > MAX_KEPT else None
        if dropped is not None:
            log.warning("mooncake: a third client without a store: the oldest is closed, which takes up to 3 s")
            REAPER.add(dropped.api.close, dropped.alive)

    def take(self, key: str) -> Client | None:
        """One that was set up in the same way."""
        with self._lock:
            if self._pid != os.getpid():
                return None
            for i, client in enumerate(self._clients):
                if client.key == key:
                    return self._clients.pop(i)
        return None


KEPT = Kept()


def obtain(options: MooncakeOptions, segment: int, device: str, ssd_path: str) -> Client:
    """A client that contributes ``segment`` bytes: a kept one whose master answers, or a new one.

    Raises:
        PrepareFailed: reason ``store_unreachable``, ``no_segments`` or ``setup_failed``.
        BackendUnavailable: see ``mooncake_client.load``.
    """
    address = options.master_server_address or ""
    args, keywords = mooncake_client.setup_arguments(options, 0, device, ssd_path)
    key = json.dumps([args, keywords], sort_keys=True)
    mooncake_client.require_reachable(options)
    client = KEPT.take(key)
    if client is not None and not client.alive():
        KEPT.give(client)
        client = None
    if client is None:
        mooncake_client.rehearse(options, device, ssd_path)
        cls = mooncake_client.load(options.rpc_timeout_ms)
        if options.enable_ssd_offload or not all(hasattr(cls, name) for name in _CALLS):
            mooncake_client.require_segments(options)
            return Client(mooncake_client.set_up(cls, options, segment, device, ssd_path), "", address)
    try:
        mooncake_client.require_segments(options)
        if client is None:
            client = Client(mooncake_client.set_up(cls, options, 0, device, ssd_path), key, address)
        client.mount(segment, options.protocol or "tcp")
    except BaseException:
        if client is not None:
            client.end()
        raise
    return client
