"""The running daemon: locks, sockets, tasks, and their end in the right order.

Start: runtime directory, its lock, the journal (which locks the state directory), then ``hooks.sock``, ``control.sock``
and HTTP; READY=1 when all of them listen. Engines come and go, so readiness does not wait for one; /readyz does.

Stop (SIGTERM, SIGINT): nothing new is accepted or read, what runs gets a moment, then the tasks are cancelled, ZMQ is
closed without lingering and the journal is closed. Everything is over in two seconds whatever was unsent (failures.md
F103). An operation in flight is undone and its client told so, in the first second of it; if a rank is too slow for
that, leases and journal settle it, as after a crash. A second signal cuts it short.
"""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import trio

from hicache_sidecar.daemon import faults
from hicache_sidecar.daemon.activation import Inherited
from hicache_sidecar.daemon.config import ConfigError
from hicache_sidecar.daemon.live import Live
from hicache_sidecar.daemon.notify import Notifier
from hicache_sidecar.daemon.paths import PublicPaths, prepare_runtime_dir
from hicache_sidecar.daemon.settings import Settings, split_address
from hicache_sidecar.engine.coordinator import Coordinator
from hicache_sidecar.engine.coordinator import serve as serve_engine
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.obs.audit import Audited
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.obs.metrics import Metrics
from hicache_sidecar.server.actors import gid_of, uid_of
from hicache_sidecar.server.binding import BindRefused, RuntimeLock, bind_public, unlink_own
from hicache_sidecar.server.hosts import is_loopback
from hicache_sidecar.server.http import HttpApi
from hicache_sidecar.server.listener import HttpServer, bind_tcp
from hicache_sidecar.server.socket import ControlServer
from hicache_sidecar.store.journal import Journal

log = logging.getLogger("hicache.daemon")

STOP_S = 1.6  # from the signal to the cancellation of everything that still runs
LEAVE_S = 0.7  # for undoing an operation in flight; the connections linger for 1 s, in which the answer must leave
STATUS_S = 1.0  # how often the STATUS text is looked at; it is sent only when it changed


class Daemon:
    """One start of the daemon."""

    def __init__(
        self,
        settings: Settings,
        inherited: Inherited,
        notifier: Notifier,
        reread: Callable[[], Settings],
        *,
        recover: bool = False,
    ) -> None:
        self._settings, self._inherited, self._notifier, self._reread = settings, inherited, notifier, reread
        self._recover = recover
        self._live = Live(settings)
        self._counters = Counters()
        self._faults = faults.plan(settings.faults)
        if self._faults:
            log.warning("fault points are active: never in production")
        self._stopping = trio.Event()

    async def run(self) -> None:
        """Serve until a signal ends it.

        Raises:
            BindRefused, PathError, ConfigError, StoreError: the start was refused; nothing is left behind.
        """
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, signals, nursery.cancel_scope)
                if faults.LOOP_BLOCK in self._settings.faults:
                    nursery.start_soon(faults.block_loop_on_signal)
                try:
                    await self._serve()
                finally:
                    nursery.cancel_scope.cancel()

    async def _serve(self) -> None:
        prepare_runtime_dir(Path(self._settings.runtime_dir))
        with contextlib.ExitStack() as stack:
            lock = RuntimeLock.take(self._settings.control_path)
            stack.callback(lock.release)
            journal = Journal.open(self._settings.state_dir, recover=self._recover, faults=self._faults)
            stack.callback(journal.close)
            log.log(logging.WARNING if self._recover else logging.INFO, "journal: %s", journal.found)
            http = self._http_sockets()
            for sock in http:
                stack.callback(sock.close)
            control, made = self._control_sockets()
            if made is not None:
                stack.callback(unlink_own, self._settings.control_path, made)
            await self._tasks(journal, control, http)

    async def _tasks(self, journal: Journal, control: list[socket.socket], http: list[socket.socket]) -> None:
        async with trio.open_nursery() as background:
            metrics = Metrics(self._counters)
            coordinator: Coordinator = await background.start(
                partial(
                    serve_engine,
                    runtime_dir=Path(self._settings.runtime_dir),
                    engine_id=self._settings.engine_id,
                    journal=journal,
                    settings=self._engine_settings(),
                    render_metrics=metrics.render,
                    faults=self._faults,
                )
            )
            metrics.follow(coordinator)
            self._open_hooks_socket()
            service = Audited(coordinator, self._counters)
            server = ControlServer(service, lambda: self._live.access, self._counters)
            api = HttpApi(service, lambda: self._live.tokens, lambda: self._live.hosts, self._counters)
            web = HttpServer(api, self._counters)
            async with trio.open_nursery() as serving:
                await serving.start(server.serve, control)
                if http:
                    await serving.start(web.serve, http)
                background.start_soon(self._notifier.watchdog)
                background.start_soon(self._show_status, coordinator)
                self._announce(control, http)
                await self._stopping.wait()
                log.info("stopping")
                self._notifier.stopping()
                serving.cancel_scope.deadline = trio.current_time() + STOP_S
                serving.start_soon(coordinator.leave, LEAVE_S)
                server.stop()
                api.closing.set()
                web.stop()
            background.cancel_scope.cancel()

    # ---- sockets

    def _control_sockets(self) -> tuple[list[socket.socket], socket.socket | None]:
        """Inherited ones, else our own; the second value is what must be removed at the end."""
        if self._inherited.control:
            return self._inherited.control, None
        control = self._settings.control
        try:
            gid = gid_of(control.group) if control.group else None
        except ValueError as exc:
            raise ConfigError(f"control.group: {exc}") from None
        sock = bind_public(self._settings.control_path, mode=int(control.mode, 8), gid=gid)
        return [sock], sock

    def _http_sockets(self) -> list[socket.socket]:
        sockets = self._inherited.http
        if not sockets and self._settings.http.listen:
            host, port = split_address(self._settings.http.listen)
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._need_token({str(entry[4][0]) for entry in found})
                sockets = bind_tcp(host, port)
            except OSError as exc:
                raise BindRefused(f"http.listen {host}:{port}: {exc.strerror or exc}") from None
        self._need_token({str(sock.getsockname()[0]) for sock in sockets})
        return sockets

    def _need_token(self, addresses: set[str]) -> None:
        """Beyond loopback a token is needed (failures.md F93)."""
        open_to = sorted(address for address in addresses if not is_loopback(address))
        if open_to and not self._live.tokens.required:
            raise BindRefused(
                f"HTTP on {', '.join(open_to)} can be reached from other hosts without a token; "
                "set http.token_file, give the systemd credential http-token, or listen on 127.0.0.1"
            )

    def _open_hooks_socket(self) -> None:
        """Give ``hooks.sock`` its group. Its peers are told by uid as well."""
        group = self._settings.hooks.group
        if group:
            try:
                os.chown(Path(self._settings.runtime_dir) / "hooks.sock", -1, gid_of(group))
            except ValueError as exc:
                raise ConfigError(f"hooks.group: {exc}") from None
            except OSError as exc:
                raise BindRefused(f"hooks.group {group}: {exc.strerror}") from None

    def _engine_settings(self) -> EngineSettings:
        hooks, leases = self._settings.hooks, self._settings.leases
        try:
            users = {uid_of(name) for name in hooks.users}
            return EngineSettings(
                heartbeat_s=hooks.heartbeat_s,
                liveness_s=hooks.liveness_s,
                prepared_s=leases.prepared_s,
                freeze_s=leases.freeze_s,
                in_doubt_s=leases.in_doubt_s,
                on_engine_restart=self._settings.on_engine_restart,
                socket_mode=int(hooks.mode, 8),
                allow_uids=frozenset({0, os.geteuid(), *users}),
            )
        except ValueError as exc:
            raise ConfigError(f"hooks, leases: {exc}") from None

    # ---- tasks

    def _announce(self, control: list[socket.socket], http: list[socket.socket]) -> None:
        log.info("control socket: %s", ", ".join(str(sock.getsockname()) if self._inherited.control else
                                                 str(self._settings.control_path) for sock in control))  # fmt: skip
        for sock in http:
            host, port = sock.getsockname()[:2]
            log.info("http: http://%s:%d", f"[{host}]" if ":" in host else host, port)
        log.info("hooks: ipc://%s/hooks.sock", self._settings.runtime_dir)
        self._notifier.ready()

    async def _show_status(self, coordinator: Coordinator) -> None:
        paths = PublicPaths([self._settings.control_path, Path(self._settings.runtime_dir) / "hooks.sock"])
        while True:
            gone = paths.gone()
            text = status_text(coordinator)
            self._notifier.status(f"{text}, {' and '.join(gone)} gone: restart" if gone else text)
            await trio.sleep(STATUS_S)

    async def _watch_signals(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._notifier.reloading()
                self._live.reload(self._reread)
                self._notifier.ready()
            elif self._stopping.is_set():
                log.warning("second signal: leaving at once")
                scope.cancel()
            else:
                self._stopping.set()


def status_text(coordinator: Coordinator) -> str:
    """One line for ``systemctl status``."""
    registry = coordinator.registry
    ready, details = coordinator.ready()
    backends = sorted({session.report.state.backend or "none" for session in registry.live.values()})
    text = f"ranks {len(registry.live)}/{registry.expected}, backend {', '.join(backends) or 'unknown'}"
    return text if ready else f"{text}, not ready: {details.get('reason', 'waiting for the engine')}"
