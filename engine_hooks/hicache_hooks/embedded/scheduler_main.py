"""A scheduler process: built from a ``RankSpec`` on standard input, ended by ``Stop``, SIGTERM or its parent's death.

Order at the end (F72): admission closes, running requests finish, an open operation is undone, the storage set is
stopped and its store closed, the hook says goodbye, and ``unclean_detach`` before it where that did not go well; all
within one budget. A process that cannot keep it (a store that hangs in native code) is ended hard by its own timer,
and by the supervisor's kill.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time

import msgspec

from hicache_hooks.embedded import messages
from hicache_hooks.embedded.adapter import EmbeddedAdapter
from hicache_hooks.embedded.gaps import Gaps
from hicache_hooks.embedded.loop import FrontLink, Loop, Waker
from hicache_hooks.embedded.pdeath import die_with
from hicache_hooks.embedded.rank import Rank
from hicache_hooks.embedded.supervisor import RankSpec
from hicache_hooks.hook import RankHook
from hicache_proto.model import EffectiveState

log = logging.getLogger("hicache_hooks.embedded")

HOOK_SHARE = 0.3  # of what is left of the stop budget: for sets on their way out and saying goodbye
HARD_EXIT_MARGIN_S = 0.5
LEAVE_MARGIN_S = HARD_EXIT_MARGIN_S + 1.0  # for telling the sidecar that the storage did not let go
CLOSING = "hicache-close-at-exit"


def main() -> int:
    """Returns the exit code."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with(spec.parent_pid)
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"hicache-engine[dp{spec.rank}]: %(levelname)s: %(message)s"
    )
    return Process(spec).run()


class Process:
    """One start of one rank."""

    def __init__(self, spec: RankSpec) -> None:
        """
        Raises:
            ValueError, RuntimeError: the rank cannot be built here; the supervisor shows it.
        """
        self._spec = spec
        options = spec.options
        self._waker = Waker()
        self._link = FrontLink(spec.front, spec.rank, spec.epoch)
        gaps = Gaps()
        self._rank = Rank(
            options, emit=lambda message: self._link.send(gaps.told(message)), wake=self._waker.wake, dp_rank=spec.rank
        )
        self._adapter = EmbeddedAdapter(self._rank, dp_size=options.dp, publish=self._publish)
        self._loop = Loop(self._rank.scheduler, self._link, self._waker, gaps)
        self._hook: RankHook | None = None
        if options.sidecar is not None:
            self._hook = RankHook(
                self._adapter,
                options.sidecar,
                engine_id=options.engine_id,
                incarnation=spec.incarnation,
                epoch=spec.epoch,
            )
            self._rank.scheduler.hook = self._hook

    def run(self) -> int:
        """Serve until told to stop; 0 when everything was closed in time."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C goes to the whole group: the parent decides
        signal.signal(signal.SIGTERM, lambda *_: self._loop.stop(self._spec.options.stop_timeout - 1.0))
        self._link.send(messages.Up(self._spec.rank, self._spec.epoch, os.getpid(), self._view))
        try:
            self._loop.run()
        except BaseException:  # the rank cannot go on; threads that still run must not keep the process either
            log.exception("the scheduler ended by an error")
            _exit_hard()
        return self._leave()

    def _leave(self) -> int:
        by = self._loop.stop_by or time.monotonic() + self._spec.options.stop_timeout
        timer = threading.Timer(max(0.1, by - time.monotonic() - HARD_EXIT_MARGIN_S), _exit_hard)
        timer.daemon = True
        timer.start()
        stuck: list[str] = []

        def leave() -> list[str]:
            stuck.extend(self._let_go(max(0.1, by - time.monotonic() - LEAVE_MARGIN_S)))
            return stuck

        if self._hook is not None:
            self._hook.close("the engine stops", max(0.1, HOOK_SHARE * (by - time.monotonic())), leave)
        else:
            leave()
        self._link.close()
        timer.cancel()
        if stuck:
            _exit_hard()
        return 0

    def _let_go(self, timeout_s: float) -> list[str]:
        """Stop and close the storage on a thread of its own, since a store's close may never return; who is stuck."""
        stuck: list[str] = [CLOSING]
        thread = threading.Thread(
            target=lambda: stuck.__setitem__(slice(None), self._adapter.shutdown(timeout_s)), name=CLOSING, daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        left = list(stuck)
        if left:
            log.error("unclean detach: threads did not stop: %s", ", ".join(left))
        return left

    @property
    def _view(self) -> messages.StorageView:
        return messages.view_of(self._adapter.effective())

    def _publish(self, state: EffectiveState) -> None:
        self._link.send(messages.Published(messages.view_of(state)))


def _exit_hard() -> None:
    """Threads that hang in native code must not keep the process."""
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
