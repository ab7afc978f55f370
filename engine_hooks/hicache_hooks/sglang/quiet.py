"""What an idle scheduler's pass hands to our other threads leaves when the scheduler is about to sleep again.

A pass that was woken for us runs a step of ours and then the engine's own idle work (about 1 ms of Python). A thread
of ours that is woken in the middle of it (the agent with an answer, a builder, a closer) takes the interpreter lock
at the scheduler's next system call and keeps it for its whole job: the pass lasted 0.5 to 1.5 ms longer, while a
millisecond later the scheduler sleeps and the lock is free. So in such a pass wake-ups are kept, and given at its end:
before the sleep, and at the next pull at the latest.

Only in passes that follow a sleep and pulled nothing: the engine was idle and stays so, and the end is near. A busy
scheduler's pass is a forward of many milliseconds; there nothing is kept.
"""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Quiet:
    """Of one scheduler. Scheduler thread, but ``postpone``."""

    __slots__ = ("_jobs", "_thread", "on")

    def __init__(self) -> None:
        self.on = False
        self._thread = 0
        self._jobs: list[Job] = []

    def begin(self) -> None:
        """From now on what this thread postpones is kept."""
        self._thread = threading.get_ident()
        self.on = True

    def postpone(self, job: Job) -> bool:
        """*any thread*: True when ``job`` is kept and will run; False when the caller is to run it now."""
        if not self.on or threading.get_ident() != self._thread:
            return False
        self._jobs.append(job)
        return True

    def end(self) -> None:
        """Run what was kept. Never raises."""
        self.on = False
        if not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                job()
            except Exception:
                log.exception("a wake-up that was kept failed")
