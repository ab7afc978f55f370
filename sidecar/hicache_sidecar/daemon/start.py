"""From checked settings to an exit code: takes inherited sockets, runs the loop, and turns refusals into one line."""

import logging
import os
from collections.abc import Callable, Iterator

import trio

from hicache_proto.errors import HicacheError
from hicache_sidecar.daemon.activation import ActivationError, take
from hicache_sidecar.daemon.config import ConfigError
from hicache_sidecar.daemon.notify import Notifier
from hicache_sidecar.daemon.paths import PathError
from hicache_sidecar.daemon.run import Daemon
from hicache_sidecar.daemon.settings import Settings
from hicache_sidecar.engine.link import LinkRefused
from hicache_sidecar.server.auth import TokenError
from hicache_sidecar.server.binding import BindRefused

log = logging.getLogger("hicache.daemon")

# Refusals that a text explains fully; anything else is a defect and leaves its traceback.
REFUSALS = (ActivationError, BindRefused, ConfigError, HicacheError, LinkRefused, PathError, TokenError)


def start(settings: Settings, reread: Callable[[], Settings], *, recover: bool = False) -> int:
    """Run until stopped. Returns 0 after a stop, 1 after a refusal or a failure."""
    notifier = Notifier(os.environ)
    try:
        inherited = take(os.environ)
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)  # not for children
        trio.run(Daemon(settings, inherited, notifier, reread, recover=recover).run)
    except BaseException as exc:
        return _failed(exc, notifier)
    finally:
        notifier.close()
    log.info("stopped")
    return 0


def _failed(exc: BaseException, notifier: Notifier) -> int:
    leaves = list(_leaves(exc))
    if any(isinstance(leaf, SystemExit) for leaf in leaves):
        raise exc
    refusals = [leaf for leaf in leaves if isinstance(leaf, REFUSALS)]
    if len(refusals) == len(leaves):
        for leaf in refusals:
            hint = leaf.hint if isinstance(leaf, HicacheError) else ""
            log.error("%s%s", leaf, f"; {hint}" if hint else "")
        notifier.status(f"failed: {refusals[0]}")
    else:
        log.critical("the daemon failed", exc_info=exc)
        notifier.status("failed: see the log")
    return 1


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc
