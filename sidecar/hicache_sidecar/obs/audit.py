"""The audit trail: one line for each request that changes something, whoever sent it and however it ended.

``Audited`` wraps the service between the transports and the coordinator, so that neither a transport nor a handler
can forget the line. It counts every request by type, transport and result, and turns nothing into anything else:
what the inner service raises, the caller sees.
"""

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from hicache_proto import api
from hicache_proto.errors import HicacheError
from hicache_sidecar.core.actor import LEVELS, Actor, Role
from hicache_sidecar.core.service import Progress, Service
from hicache_sidecar.obs.counters import Counters

log = logging.getLogger("hicache.audit")

# Fields that say what was asked. The extra config is never one of them: it may hold secrets (failures.md F94).
_SHOWN = (
    "hicache_storage_backend", "mode", "swap", "dry_run", "force", "revision", "if_revision", "request_id",
    "operation_id", "enabled", "how", "confirm", "hold_s", "release", "keep_others",
)  # fmt: skip
MAX_TEXT = 200  # characters of any one value: a reason is a sentence, not a document


def describe_actor(actor: Actor) -> str:
    """``root uid=0 pid=4711 via=socket``; over HTTP the principal has no uid."""
    parts = [clean(actor.name)]
    parts += [f"{name}={value}" for name in ("uid", "pid") if (value := getattr(actor, name)) is not None]
    return " ".join([*parts, f"via={actor.transport}"])


def clean(value: object) -> str:
    """One line, bounded, quotes kept: a value from a client cannot forge a second audit line."""
    text = "".join(char if char.isprintable() else "?" for char in str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def describe_request(request: api.ApiRequest) -> str:
    """``attach hicache_storage_backend=file mode=strict reason="upgrade"``."""
    parts = [str(request.__struct_config__.tag)]
    for name in _SHOWN:
        value = getattr(request, name, None)
        if value is not None and value is not False:
            parts.append(f"{name}={clean(value)}")
    reason = getattr(request, "reason", "")
    if reason:
        parts.append(f'reason="{clean(reason)}"')
    return " ".join(parts)


def _describe_result(document: api.Document) -> str:
    shown = []
    for name in ("operation_id", "revision", "changed", "state", "deleted", "namespace"):
        value = getattr(document, name, None)
        if value is not None:
            shown.append(f"{name}={clean(value)}")
    return " ".join(shown)


class Audited:
    """A ``Service`` that logs changes and counts everything."""

    def __init__(self, inner: Service, counters: Counters) -> None:
        self._inner = inner
        self._counters = counters

    async def handle(self, request: api.ApiRequest, actor: Actor, progress: Progress) -> api.Document:
        """See ``Service.handle``."""
        started = time.monotonic()
        code, result = "cancelled", ""
        try:
            document = await self._inner.handle(request, actor, progress)
            code, result = "ok", _describe_result(document)
            return document
        except HicacheError as exc:
            code = exc.code
            result = f"operation_id={clean(exc.operation_id)}" if exc.operation_id else ""
            raise
        except Exception:
            code = "internal"
            raise
        finally:
            tag = str(request.__struct_config__.tag)
            self._counters.add("hicache_requests", tag, actor.transport, code)
            if LEVELS[type(request)] > Role.VIEWER:
                elapsed_ms = (time.monotonic() - started) * 1000
                log.info(
                    "audit: %s: %s -> %s%s (%.0f ms)",
                    describe_actor(actor), describe_request(request), code, f" {result}" if result else "", elapsed_ms,
                )  # fmt: skip

    def watch(self, request: api.WatchRequest, actor: Actor) -> AsyncIterator[api.EventDocument]:
        """See ``Service.watch``."""
        self._counters.add("hicache_requests", "watch", actor.transport, "ok")
        return self._inner.watch(request, actor)

    def live(self) -> dict[str, Any]:
        """See ``Service.live``."""
        return self._inner.live()

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """See ``Service.ready``."""
        return self._inner.ready()

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """See ``Service.metrics``."""
        return self._inner.metrics(accept)

    @property
    def engine_id(self) -> str | None:
        """See ``Service.engine_id``."""
        return self._inner.engine_id
