"""The seam between the transports (``server/``) and the coordinator (``engine/``).

Both transports decode a request, name the actor, and call ``Service.handle``; nothing else. Tests of the
transports give a small class with the same method.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from hicache_proto import api
from hicache_sidecar.core.actor import Actor

Progress = Callable[[dict[str, Any]], None]
"""Called with ``{"operation_id", "phase", "message", "blocked_by", "ranks"}`` while an operation runs."""


class Service(Protocol):
    """What the sidecar can do, whatever the transport."""

    async def handle(self, request: api.ApiRequest, actor: Actor, progress: Progress) -> api.Document:
        """Authorise, run, answer.

        An operation goes on when its caller is cancelled. Requests of type WatchRequest go to ``watch``.

        Raises:
            HicacheError: every refusal and failure.
        """

    def watch(self, request: api.WatchRequest, actor: Actor) -> AsyncIterator[api.EventDocument]:
        """A snapshot, then numbered events, until the caller closes the iterator."""

    def live(self) -> dict[str, Any]:
        """/healthz: the loop turns."""

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """/readyz: topology complete and recovery ended, with the reasons when not."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """/metrics: body and content type."""

    @property
    def engine_id(self) -> str | None:
        """The engine that this sidecar serves, once known."""
