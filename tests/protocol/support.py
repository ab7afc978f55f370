"""The sidecar's engine side in this process: real ZMQ, a real journal, no transports; and waits that have an end."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import trio
import zmq
from tests.rigs.stub_engine import StubEngine

from hicache_proto import api
from hicache_proto.hooklink import decode_from_sidecar
from hicache_sidecar.core.actor import Actor, Role
from hicache_sidecar.engine.coordinator import Coordinator, serve
from hicache_sidecar.engine.settings import EngineSettings
from hicache_sidecar.store.journal import Journal

WAIT_S = 10.0
# Heartbeats and leases short enough for a test, in the proportions of the defaults.
FAST = EngineSettings(
    heartbeat_s=0.1,
    liveness_s=0.8,
    reconnect_grace_s=0.2,
    prepared_s=3.0,
    freeze_s=1.0,
    in_doubt_s=2.0,
    decide_margin_s=0.3,
    call_s=1.0,
)
ADMIN = Actor(name="test-admin", role=Role.ADMIN, uid=0)
OPERATOR = Actor(name="test-operator", role=Role.OPERATOR, uid=1000)

fast = partial(replace, FAST)


def silent(_progress: dict[str, Any]) -> None:
    """A client that does not look at progress."""


class Side:
    """One running coordinator."""

    def __init__(self, coordinator: Coordinator, journal: Journal, scope: trio.CancelScope) -> None:
        self.coordinator, self.journal, self.scope = coordinator, journal, scope

    async def ask(self, request: api.ApiRequest, actor: Actor = ADMIN, progress: Any = silent) -> Any:
        """One request, as a transport would make it."""
        with trio.fail_after(WAIT_S * 3):
            return await self.coordinator.handle(request, actor, progress)

    async def attach(self, backend: str = "file", config: str | None = None, **options: Any) -> Any:
        """PUT."""
        return await self.ask(
            api.AttachRequest(
                hicache_storage_backend=backend, hicache_storage_backend_extra_config_json=config, **options
            )
        )

    async def detach(self, **options: Any) -> Any:
        """DELETE."""
        return await self.ask(api.DetachRequest(**options))

    async def status(self, fresh: bool = True) -> api.StatusDocument:
        """GET."""
        document: api.StatusDocument = await self.ask(api.StatusRequest(fresh=fresh))
        return document

    async def until(self, what: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Wait for news of the registry until ``what()`` holds."""
        with trio.fail_after(within_s):
            while not what():
                await self.coordinator.registry.changed.park()

    async def ready(self) -> None:
        """All ranks here, recovery over."""
        await self.until(lambda: self.coordinator.ready()[0])


@asynccontextmanager
async def sidecar(root: Path, settings: EngineSettings = FAST, *, engine_id: str | None = None) -> AsyncIterator[Side]:
    """A coordinator with its journal under ``root``; leaving the context is a crash: nothing is said to any rank."""
    runtime = root / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    journal = Journal.open(root / "state")
    try:
        async with trio.open_nursery() as nursery:
            coordinator = await nursery.start(
                partial(serve, runtime_dir=runtime, engine_id=engine_id, journal=journal, settings=settings)
            )
            yield Side(coordinator, journal, nursery.cancel_scope)
            nursery.cancel_scope.cancel()
    finally:
        journal.close()


@asynccontextmanager
async def rig(root: Path, settings: EngineSettings = FAST, **engine: Any) -> AsyncIterator[tuple[Side, StubEngine]]:
    """A ready coordinator and STUB(n)."""
    async with sidecar(root, settings) as side:
        with StubEngine(endpoint(root), **engine) as stub:
            await side.ready()
            yield side, stub


def endpoint(root: Path) -> str:
    """Where the hooks connect."""
    return f"ipc://{root}/run/hooks.sock"


async def stub_sees(stub: StubEngine, what: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Wait in a thread until ``what()`` holds in the stub."""
    if not await trio.to_thread.run_sync(partial(stub.wait_for, what, within_s)):
        raise TimeoutError("the stub did not get there")


@contextmanager
def dealer(where):
    """A raw peer, used from worker threads."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    sock.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
    sock.connect(where)
    try:
        yield sock
    finally:
        sock.close(linger=0)
        context.destroy(linger=0)


async def receive(sock):
    return decode_from_sidecar(await trio.to_thread.run_sync(sock.recv))
