"""How long the scheduler's loop did not turn, told with every answer (``meta_info.loop_gap_ms``).

A gap is the time from one look at the loop's messages to the end of the pass that follows; the loop's own sleep is
none. A store whose set-up ran on the scheduler thread, or held the interpreter, would show as one gap of its length.
Scheduler thread only.
"""

import time
from collections.abc import Callable

import msgspec

from hicache_hooks.embedded.messages import Done, RankMessage


class Gaps:
    """The longest gap since it was last told."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = 0.0
        self._longest_s = 0.0

    def begin(self) -> None:
        """A turn begins."""
        self._begun = self._clock()

    def end(self) -> None:
        """Its pass ended."""
        self._longest_s = max(self._longest_s, self._clock() - self._begun)

    def told(self, message: RankMessage) -> RankMessage:
        """``message``; an answer with the longest gap since the last one, the present turn included."""
        if not isinstance(message, Done):
            return message
        longest_s = max(self._longest_s, self._clock() - self._begun)
        self._longest_s = 0.0
        return msgspec.structs.replace(message, loop_gap_ms=round(longest_s * 1000, 3))
