"""The engine's HTTP front: generate, flush_cache, get_server_info, health. JSON in, JSON out, errors too.

It holds no torch: it checks a request, picks a replica, and waits for the answer or for the caller to leave.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hicache_hooks.embedded import messages
from hicache_hooks.embedded.options import VOCABULARY, EngineOptions
from hicache_hooks.embedded.router import Router
from hicache_proto.errors import ErrorBody, HicacheError, Internal, InvalidRequest, NoEngine, NotIdle, TooLarge

MAX_BODY_BYTES = 1 << 20
DEFAULT_NEW_TOKENS = 128  # SGLang's default
FLUSH_TIMEOUT_S = 30.0
MAX_FLUSH_TIMEOUT_S = 3600.0


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding is greedy: whatever else a sampler could be told is refused, not ignored."""

    max_new_tokens: int | None = None
    ignore_eos: bool = True


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /generate``: ``text`` or ``input_ids``."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    dp_rank: int | None = None


_body = msgspec.json.Decoder(GenerateBody)


class Front:
    """The routes."""

    def __init__(self, router: Router, options: EngineOptions) -> None:
        self.closing = False
        self._router = router
        self._options = options
        self._rids = itertools.count(1)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/generate", _answered(self.generate), methods=["POST"]),
            Route("/flush_cache", _answered(self.flush_cache), methods=["POST"]),
            Route("/get_server_info", _answered(self.server_info), methods=["GET"]),
            Route("/health", _answered(self.health), methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _crash})

    async def generate(self, request: Request) -> Response:
        """Greedy decoding; the caller's leaving aborts the request."""
        if self.closing:
            raise NoEngine("the engine is stopping")
        body = decode_generate(await _read(request))
        tokens, max_new = checked(body, self._options)
        replica = self._router.pick(body.dp_rank)
        submit = messages.Submit(f"r{next(self._rids)}", tokens, max_new, body.sampling_params.ignore_eos)
        done = await _unless_gone(request, self._router.generate(replica, submit))
        return _json(200, document(done, replica.rank))

    async def flush_cache(self, request: Request) -> Response:
        """Wait for idle, then empty L1 and L2 of every replica."""
        timeout_s = _flush_timeout(request)
        replicas = [self._router.pick(rank) for rank in range(self._options.dp)]
        results = await asyncio.gather(*(self._router.flush(r, timeout_s) for r in replicas))
        blocked = [
            {"rank": rank, "name": name, "count": count}
            for rank, result in enumerate(results)
            for name, count in result.blocked_by.items()
        ]
        failed = [rank for rank, result in enumerate(results) if not result.ok]
        if failed:
            raise NotIdle(
                f"the cache was not flushed on dp_rank {', '.join(map(str, failed))}: not idle within {timeout_s:g} s",
                details={"blocked_by": blocked, "flushed": [r for r in range(len(results)) if r not in failed]},
                hint="repeat with a longer timeout",
            )
        return _json(200, {"success": True, "message": "L1 and L2 are empty"})

    async def server_info(self, request: Request) -> Response:
        """The engine's options, and its storage configuration as each replica last published it."""
        internal = [{"dp_rank": r.rank, **msgspec.to_builtins(r.view)} for r in self._router.replicas]
        return _json(200, {**msgspec.to_builtins(self._options), **internal[0], "internal_states": internal})

    async def health(self, request: Request) -> Response:
        """200 when every replica serves."""
        ranks = [{"dp_rank": r.rank, "up": r.up, "epoch": r.epoch, "pid": r.pid} for r in self._router.replicas]
        status = "stopping" if self.closing else "ok" if self._router.all_up else "starting"
        return _json(200 if status == "ok" else 503, {"status": status, "ranks": ranks})


# ---------------------------------------------------------------------- requests


def decode_generate(raw: bytes) -> GenerateBody:
    """
    Raises:
        InvalidRequest: not JSON, an unknown field, a wrong type.
    """
    try:
        return _body.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "decoding is greedy: sampling_params takes max_new_tokens and ignore_eos only"
        raise InvalidRequest(f"body of /generate: {error}", hint=hint) from error


def checked(body: GenerateBody, options: EngineOptions) -> tuple[list[int], int]:
    """Prompt tokens and the number of tokens to generate.

    Raises:
        InvalidRequest: no prompt, a token that does not exist, or more than the engine has room for.
    """
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids")
    tokens = list(body.text.encode()) if body.text is not None else body.input_ids or []
    if not tokens:
        raise InvalidRequest("the prompt is empty")
    if not all(0 <= token < VOCABULARY for token in tokens):
        raise InvalidRequest(f"input_ids: tokens are 0 to {VOCABULARY - 1}")
    room = options.request_tokens - len(tokens)
    if room < 1:
        raise InvalidRequest(f"a prompt of {len(tokens)} tokens: context is {options.request_tokens} with the answer")
    asked = body.sampling_params.max_new_tokens
    if asked is None:
        return tokens, min(DEFAULT_NEW_TOKENS, room)
    if not 1 <= asked <= room:
        raise InvalidRequest(f"max_new_tokens {asked}: at least 1, and {room} fit after this prompt")
    return tokens, asked


def document(done: messages.Done, dp_rank: int) -> dict[str, Any]:
    """The answer of ``/generate``."""
    return {
        "output_ids": done.output,
        "text": bytes(token for token in done.output if token < 256).decode(errors="replace"),
        "meta_info": {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": len(done.output),
            "cached_tokens": done.device + done.host + done.storage,
            "cached_tokens_details": {"device": done.device, "host": done.host, "storage": done.storage},
            "finish_reason": done.finish_reason,
            "dp_rank": dp_rank,
            "loop_gap_ms": done.loop_gap_ms,
        },
    }


def _flush_timeout(request: Request) -> float:
    text = request.query_params.get("timeout")
    try:
        seconds = FLUSH_TIMEOUT_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_FLUSH_TIMEOUT_S:
        raise InvalidRequest(f"timeout: seconds from 0 to {MAX_FLUSH_TIMEOUT_S:g}")
    return seconds


async def _read(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise TooLarge(f"body over {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _unless_gone(request: Request, work: Awaitable[messages.Done]) -> messages.Done:
    """Await ``work``; when the caller hangs up first, cancel it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------------- answers

Handler = Callable[[Request], Awaitable[Response]]


def _answered(handler: Handler) -> Handler:
    """The one place that turns errors into answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except HicacheError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return endpoint


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _error(error: HicacheError) -> Response:
    headers = {"Retry-After": "1"} if error.retryable else None
    return _json(error.status, {"error": error.body()}, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "not_found"}.get(status, "internal")
    return _json(status, {"error": ErrorBody(code, f"{request.method} {request.url.path}: no such route")})


async def _crash(request: Request, error: Exception) -> Response:
    return _error(Internal(f"{type(error).__name__} in {request.url.path}"))
