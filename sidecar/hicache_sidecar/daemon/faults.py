"""Named fault points of the daemon process, for tests. None is active unless the configuration names it.

``loop.block``: on SIGUSR2 the trio loop stands still for BLOCK_S, as a defect would make it; the watchdog must notice.
"""

import logging
import signal
import time
from collections.abc import Iterable

import trio

log = logging.getLogger("hicache.daemon")

LOOP_BLOCK = "loop.block"
FAULTS = {LOOP_BLOCK: "SIGUSR2 blocks the trio loop"}
BLOCK_S = 600.0  # longer than any watchdog interval


def unknown(names: Iterable[str]) -> list[str]:
    """Names that are no fault points."""
    return sorted(set(names) - set(FAULTS))


async def block_loop_on_signal() -> None:
    """Serve ``loop.block``."""
    log.warning("fault point %s is active: never in production", LOOP_BLOCK)
    with trio.open_signal_receiver(signal.SIGUSR2) as signals:
        async for _ in signals:
            log.warning("fault point %s: the loop stands still now", LOOP_BLOCK)
            time.sleep(BLOCK_S)  # noqa: ASYNC251 - the point of it
