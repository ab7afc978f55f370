"""Mooncake's native client, made and ended without hurting the engine around it.

What was measured with 0.3.13 (tcp, loopback):

* ``setup()`` holds the GIL all the time. No master at the port: 90 s. A master that is there and hangs: twenty RPC
  time-outs, 22 s with one second each; a TCP connection to it still succeeds. So the whole set-up is done once in a
  child process first, which is killed at a deadline; only what worked there is done here.
* ``close()`` holds the GIL too: 1 to 3 s with a healthy master, 4 s with a hung one, 14 s with a dead one. So clients
  are kept for the next attach (``mooncake_kept.py``). A client is given up when its master has just answered; else it
  is left to a reaper that waits for the master. Until then its segment's memory stays, and a process that ends without
  closing is fine.
* the RPC time-out is read once, from ``MC_RPC_TIMEOUT_MS``, when the package is loaded.
"""

import importlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hicache_hooks.backends import child
from hicache_hooks.backends.mooncake_options import MooncakeOptions, endpoint
from hicache_proto.errors import BackendUnavailable, PrepareFailed

log = logging.getLogger(__name__)

CONNECT_S = 1.0  # TCP connection to master or metadata server
REHEARSAL_S = 10.0  # child process: start, import (0.1 s), set-up (0.1 s); two busy cores
HTTP_S = 3.0
REAP_EVERY_S = 5.0
TIMEOUT_ENV = "MC_RPC_TIMEOUT_MS"
NO_SPACE, WRONG_SIZE, MISSING, LEASED = -200, -600, -704, -706
NOT_READY = -703  # somebody is writing it
RPC_FAILED, RPC_TIMEOUT = -900, -901

# Ends without close: that would take seconds.
_REHEARSAL = """
import json, os, sys
try:
    from mooncake.store import MooncakeDistributedStore
except BaseException as error:
    print("IMPORT", str(error)[:200], flush=True)
    os._exit(1)
args, kwargs = json.loads(sys.stdin.read())
print("RC", MooncakeDistributedStore().setup(*args, **kwargs), flush=True)
os._exit(0)
"""


def load(rpc_timeout_ms: int) -> Any:
    """The client's class. The first call in a process fixes the RPC time-out.

    Raises:
        BackendUnavailable: the package or a library of it is missing.
    """
    os.environ.setdefault(TIMEOUT_ENV, str(rpc_timeout_ms))
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except (ImportError, OSError, AttributeError) as exc:
        missing = str(exc)[:200]
    raise BackendUnavailable(f"mooncake cannot be imported here: {missing}", details={"missing": [missing]})


def setup_arguments(
    options: MooncakeOptions, segment: int, device: str, ssd_path: str
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of ``setup``; keywords only where they differ from the defaults."""
    args = [
        options.local_hostname, options.metadata_server, segment, options.local_buffer_size, options.protocol, device,
        options.master_server_address,
    ]  # fmt: skip
    keywords: dict[str, Any] = {}
    if options.enable_ssd_offload:
        keywords["enable_ssd_offload"] = True
    if ssd_path:
        keywords["ssd_offload_path"] = ssd_path
    if options.tenant_id not in (None, "default"):
        keywords["tenant_id"] = options.tenant_id
    return args, keywords


def rehearse(options: MooncakeOptions, device: str, ssd_path: str) -> None:
    """Set up once in a child: it contributes no memory, offloads nothing, and is gone before anybody could use it.

    Raises:
        PrepareFailed: reason ``store_unreachable`` or ``setup_failed``.
        BackendUnavailable: the package cannot be imported.
    """
    args, keywords = setup_arguments(options, 0, device, ssd_path)
    _rehearse(args, {k: v for k, v in keywords.items() if k == "tenant_id"}, options.rpc_timeout_ms)


def set_up(cls: Any, options: MooncakeOptions, segment: int, device: str, ssd_path: str) -> Any:
    """A client of ``cls`` (see ``load``) that is set up. After a rehearsal.

    Raises:
        PrepareFailed: reason ``setup_failed``.
    """
    args, keywords = setup_arguments(options, segment, device, ssd_path)
    client = cls()
    code = client.setup(*args, **keywords)
    if code:
        raise PrepareFailed(
            f"Mooncake's set-up failed with {code}", details={"reason": "setup_failed", "code": int(code)}
        )
    return client


def require_reachable(options: MooncakeOptions) -> None:
    """TCP connections to the master and to a metadata server.

    Raises:
        PrepareFailed: reason ``store_unreachable``.
    """
    for what, address in (("master", options.master_server_address), ("metadata server", options.metadata_server)):
        if address is not None and not answers(address):
            raise PrepareFailed(
                f"no connection to the mooncake {what} at {address}", details={"reason": "store_unreachable"}
            )


def answers(address: str, timeout_s: float = CONNECT_S) -> bool:
    """True when a connection is accepted, or when ``address`` names no single TCP port (etcd lists, P2PHANDSHAKE)."""
    found = endpoint(address)
    if found is None:
        return True
    try:
        socket.create_connection(found, timeout_s).close()
    except OSError:
        return False
    return True


def _rehearse(args: list[Any], keywords: dict[str, Any], rpc_timeout_ms: int) -> None:
    env = {**os.environ, TIMEOUT_ENV: os.environ.get(TIMEOUT_ENV, str(rpc_timeout_ms))}
    said, code = child.ask(_REHEARSAL, [], json.dumps([args, keywords]), REHEARSAL_S, env) or ("", None)
    if code is None:
        raise PrepareFailed(
            f"the mooncake master accepts connections and does not answer within {REHEARSAL_S:.0f} s",
            details={"reason": "store_unreachable"},
        )
    line = next((part for part in said.splitlines() if part.startswith(("RC ", "IMPORT "))), "")
    if line.startswith("IMPORT "):
        missing = line.removeprefix("IMPORT ")
        raise BackendUnavailable(f"mooncake cannot be imported here: {missing}", details={"missing": [missing]})
    if line != "RC 0":
        how = f"failed with {line.removeprefix('RC ')}" if line else f"ended its process with {code}"
        raise PrepareFailed(f"Mooncake's set-up {how}", details={"reason": "setup_failed", "code": code})


def require_segments(options: MooncakeOptions) -> None:
    """SGLang's ``check_server``, asked once instead of for ten minutes.

    Raises:
        PrepareFailed: reason ``no_segments``.
    """
    if not options.check_server:
        return
    import urllib.error
    import urllib.request

    found = endpoint(options.master_server_address or "")
    body = b""
    if found is not None:
        url = f"http://{found[0]}:{options.master_metrics_port}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=HTTP_S) as answer:
                body = answer.read(1 << 16)
        except (OSError, ValueError, urllib.error.URLError):
            body = b""
    if not body.strip():
        raise PrepareFailed("no storage node has mounted memory yet", details={"reason": "no_segments"})


class Reaper:
    """Ends clients whose master did not answer when they were given up, once it answers again."""

    def __init__(self, every_s: float = REAP_EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._running = False

    @property
    def waiting(self) -> int:
        """Clients that have not been ended yet."""
        return len(self._waiting)

    def add(self, end: Callable[[], None], alive: Callable[[], bool]) -> None:
        """Call ``end``, which holds the client, once ``alive`` says yes."""
        with self._lock:
            self._waiting.append((end, alive))
            if not self._running:
                try:
                    threading.Thread(target=self._run, name="hicache-mooncake-reaper", daemon=True).start()
                except RuntimeError:  # no thread to be had; the next client that is added tries again
                    log.warning("mooncake: no thread to close clients with; %d wait", len(self._waiting))
                    return
                self._running = True

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)  # a pace; nothing waits for this thread
            for item in list(self._waiting):
                if self._reap(*item):
                    with self._lock:
                        self._waiting.remove(item)
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return

    @staticmethod
    def _reap(end: Callable[[], None], alive: Callable[[], bool]) -> bool:
        """True when the client is done with. One that raises must not keep the others from their end."""
        try:
            if not alive():
                return False
        except Exception as exc:
            log.warning("mooncake: a client that waits for its end raised %s; asked again", type(exc).__name__)
            return False
        try:
            end()
        except Exception as exc:  # not again: a call after a close ends the process
            log.warning("mooncake: a client raised %s when it was closed, and is left alone", type(exc).__name__)
        return True


REAPER = Reaper()
