"""The last look at the clock before B is written (rule 4).

The sidecar may be stopped at any moment: by a signal, with its whole machine, or by a loop that stalls. What it saw
of the leases before is then worth nothing, so the thread that writes looks itself, and nothing but the write follows.
Stopped within the write or its fsync, B is decided all the same: ranks whose leases ended meanwhile are on A, answer
FINALIZE with ``expired``, and are brought to B by the same operation before its client is answered (rule 3's window).
"""

from collections.abc import Callable

import trio

TOO_LATE = "the sidecar stood still before the decision: it cannot vouch for the ranks' leases any more"


async def write_in_time(write: Callable[[], object], until: float) -> bool:
    """Call ``write`` in a thread, unless it is ``until`` (trio time) by then; whether it was called. What it raises
    goes up."""
    clock = trio.lowlevel.current_clock()

    def look_and_write() -> bool:
        if clock.current_time() >= until:
            return False
        write()
        return True

    return await trio.to_thread.run_sync(look_and_write)
