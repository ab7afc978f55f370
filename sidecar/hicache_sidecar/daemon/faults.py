"""The setting ``faults``: fault points of the transaction (``core.faults``), and one of the daemon itself.

``loop.block``: on SIGUSR2 the trio loop stands still for BLOCK_S, as a defect would make it; the watchdog must notice.
"""

import logging
import signal
import time
from collections.abc import Iterable

import trio

from hicache_sidecar.core.faults import Faults

log = logging.getLogger("hicache.daemon")

LOOP_BLOCK = "loop.block"
BLOCK_S = 600.0  # longer than any watchdog interval


def plan(items: Iterable[str]) -> Faults:
    """The transaction's fault points among ``items``.

    Raises:
        ValueError: an item names no fault point, or an action that it has not.
    """
    return Faults(",".join(item for item in items if item != LOOP_BLOCK))


async def block_loop_on_signal() -> None:
    """Serve ``loop.block``."""
    log.warning("fault point %s is active: never in production", LOOP_BLOCK)
    with trio.open_signal_receiver(signal.SIGUSR2) as signals:
        async for _ in signals:
            log.warning("fault point %s: the loop stands still now", LOOP_BLOCK)
            time.sleep(BLOCK_S)  # noqa: ASYNC251 - the point of it
