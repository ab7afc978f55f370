"""One control connection: hello, then requests that run side by side, each answered under its own id.

Rules
1. Nothing that a client does reaches another client or the daemon: every exception ends here.
2. A frame that cannot be cut or decoded ends the connection, after one ``error`` frame with id 0; a well-formed frame
   with a wrong request in it is answered under its id and the connection goes on.
3. At most MAX_IN_FLIGHT requests run per connection; the next frame is read when one of them ends.
4. When the client leaves, its watches end and its other requests are no longer waited for; operations go on (they
   belong to the coordinator). A client that only closed its sending side still gets what is answered in LINGER_S.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import trio

import hicache_proto.version
from hicache_proto import __version__, api, control
from hicache_proto.errors import HicacheError, InvalidRequest
from hicache_sidecar.core.actor import Actor, authorize
from hicache_sidecar.core.service import Service
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server.outbox import Outbox
from hicache_sidecar.server.reader import FrameReader
from hicache_sidecar.server.replies import invalid, refusal

log = logging.getLogger("hicache.server")

MAX_IN_FLIGHT = 32  # requests of one connection; a client needs one or two
LINGER_S = 1.0  # with the rest of the stop below the two seconds of failures.md F103


class _IdOnly(msgspec.Struct):
    """Reads the id of a request whose body was refused."""

    id: int = 0


_ids = msgspec.msgpack.Decoder(_IdOnly)


class Connection:
    """Serves one accepted stream until it ends."""

    def __init__(
        self, stream: trio.abc.Stream, actor: Actor, service: Service, counters: Counters, closing: trio.Event
    ) -> None:
        self._stream, self._actor, self._service, self._counters = stream, actor, service, counters
        self._closing = closing  # set when the daemon stops: no request is read any more
        self._reader = FrameReader(stream)
        self._outbox = Outbox()
        self._in_flight: dict[int, trio.CancelScope] = {}
        self._watches: set[int] = set()
        self._told: set[int] = set()  # requests whose operation id was told
        self._slots = trio.Semaphore(MAX_IN_FLIGHT)
        self._reading = trio.CancelScope()

    async def run(self) -> None:
        """Serve. Never raises an Exception; the stream is closed at the end."""
        result = "closed"
        try:
            async with self._stream:
                result = await self._serve()
        except* (trio.TooSlowError, TimeoutError):
            result = "too_slow"
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            result = "broken"
        except* HicacheError as group:
            result = "refused"
            log.info("connection of %s dropped: %s", self._actor.name, group.exceptions[0])
        except* Exception as group:
            result = "internal"
            refusal(group, self._counters, "socket")
        finally:
            self._counters.add("hicache_control_connections", result)

    async def _serve(self) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._outbox.write_to, self._stream)
            try:
                if not await self._hello():
                    return "silent"
                async with trio.open_nursery() as requests:
                    requests.start_soon(self._stop_reading)
                    ended = await self._read_requests(requests)
                    self._linger(requests)
            except (HicacheError, msgspec.MsgspecError) as exc:
                self._drop(exc)
                return "refused"
            finally:
                self._outbox.close()
        return ended

    # ---- reading

    async def _hello(self) -> bool:
        payload = await self._reader.first()
        if payload is None:
            return False
        hello = control.decode_client_frame(payload)
        if not isinstance(hello, control.ClientHello):
            raise InvalidRequest("the first frame must be hello")
        protocol = hicache_proto.version.negotiate(hello.protocol)
        await self._outbox.put(
            control.ServerHello(
                protocol=protocol,
                server=f"hicache-sidecar {__version__}",
                role=self._actor.role.name.lower(),
                engine_id=self._service.engine_id,
            )
        )
        return True

    async def _stop_reading(self) -> None:
        await self._closing.wait()
        self._reading.cancel()

    async def _read_requests(self, nursery: trio.Nursery) -> str:
        """Read until the client leaves, breaks the protocol, or the daemon stops."""
        with self._reading:
            try:
                while (payload := await self._reader.next(lambda: bool(self._in_flight))) is not None:
                    await self._accept(payload, nursery)
            except (HicacheError, msgspec.MsgspecError) as exc:
                self._drop(exc)
                return "refused"
        return "closed"

    async def _accept(self, payload: bytes, nursery: trio.Nursery) -> None:
        try:
            frame = control.decode_client_frame(payload)
            if not isinstance(frame, control.Request):
                raise InvalidRequest("hello was already said")
        except msgspec.ValidationError as exc:
            await self._refuse(payload, exc)
            return
        if frame.id <= 0 or frame.id in self._in_flight:
            raise InvalidRequest(f"request id {frame.id} is not above 0, or is still in use")
        try:
            self._slots.acquire_nowait()  # without the turn of the loop that ``acquire`` costs
        except trio.WouldBlock:
            await self._slots.acquire()
        scope = self._in_flight[frame.id] = trio.CancelScope()
        nursery.start_soon(self._answer, frame, scope)

    async def _refuse(self, payload: bytes, exc: msgspec.ValidationError) -> None:
        try:
            ident = _ids.decode(payload).id
        except msgspec.MsgspecError:
            raise exc from None
        self._counters.add("hicache_control_dropped_frames", "invalid_request")
        await self._outbox.put(control.Error(id=ident, error=invalid(exc, control.Request).body()))

    def _drop(self, exc: HicacheError | msgspec.MsgspecError) -> None:
        body = refusal(exc, self._counters, "socket")
        self._counters.add("hicache_control_dropped_frames", str(body.details.get("reason") or body.code))
        log.info("connection of %s dropped: %s", self._actor.name, body.message)
        self._outbox.offer(control.Error(id=0, error=body))

    def _linger(self, nursery: trio.Nursery) -> None:
        """Let running requests end for a moment, then stop waiting for them."""
        for ident in self._watches:
            self._in_flight[ident].cancel()
        if self._in_flight:
            nursery.cancel_scope.deadline = trio.current_time() + LINGER_S
            nursery.start_soon(self._cancel_when_idle, nursery.cancel_scope)
        else:
            nursery.cancel_scope.cancel()

    async def _cancel_when_idle(self, scope: trio.CancelScope) -> None:
        """End the nursery (with its waiting task) once the last request was answered."""
        for _ in range(MAX_IN_FLIGHT):
            await self._slots.acquire()
        scope.cancel()

    # ---- answering

    async def _answer(self, frame: control.Request, scope: trio.CancelScope) -> None:
        try:
            with scope:
                try:
                    await self._outbox.put(await self._result(frame))
                except Exception as exc:
                    await self._outbox.put(control.Error(id=frame.id, error=refusal(exc, self._counters, "socket")))
        finally:
            self._in_flight.pop(frame.id, None)
            self._watches.discard(frame.id)
            self._told.discard(frame.id)
            self._slots.release()

    async def _result(self, frame: control.Request) -> control.Result:
        if isinstance(frame.body, api.WatchRequest):
            self._watches.add(frame.id)
            await self._watch(frame.id, frame.body)
            return control.Result(id=frame.id, document=None)
        document = await self._service.handle(frame.body, self._actor, partial(self._progress, frame.id))
        return control.Result(id=frame.id, document=document)

    def _progress(self, ident: int, data: dict[str, Any]) -> None:
        """The first goes out at once: it names the operation, which a client must know when we die."""
        if ident not in self._in_flight:
            return
        if self._outbox.offer(control.Progress(id=ident, data=data), soon=ident in self._told):
            self._told.add(ident)
        else:
            self._counters.add("hicache_control_dropped_progress")

    async def _watch(self, ident: int, request: api.WatchRequest) -> None:
        authorize(self._actor, request)
        async with closing_events(self._service.watch(request, self._actor)) as events:
            async for event in events:
                await self._outbox.put(control.Progress(id=ident, data=msgspec.to_builtins(event)))


@contextlib.asynccontextmanager
async def closing_events(events: AsyncIterator[api.EventDocument]) -> AsyncIterator[AsyncIterator[api.EventDocument]]:
    """Close the service's iterator whatever ends the watch, also cancellation."""
    try:
        yield events
    finally:
        aclose = getattr(events, "aclose", None)
        if aclose is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await aclose()
