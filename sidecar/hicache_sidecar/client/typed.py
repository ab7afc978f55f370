"""The typed client: one method per request of ``hicache_proto.api``, documents as structs.

Every method raises ``HicacheError`` when the sidecar refuses or the operation fails, and ``ConnectionLost`` when the
sidecar goes away (outcome unknown; ``operation_id`` says what to ask for). Durations are seconds.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

import msgspec

from hicache_proto import api
from hicache_proto.failover import FailoverDocument, FailoverPolicy, FailoverRequest, SetFailoverRequest
from hicache_proto.model import KnobValue
from hicache_sidecar.client.connection import CONNECT_TIMEOUT_S, GRACE_S, REQUEST_TIMEOUT_S, Connection, OnProgress

T = TypeVar("T")


class Client:
    """Typed calls over one connection; a context manager. ``on_progress`` is called while an operation runs."""

    def __init__(self, connection: Connection, on_progress: OnProgress | None = None) -> None:
        self.connection = connection
        self.on_progress = on_progress

    @classmethod
    def connect(
        cls,
        path: str | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        client: str = "",
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Connect to ``path`` (default: ``$HICACHE_SIDECAR_SOCKET``, else the packaged path).

        Raises:
            Unreachable, HicacheError: as ``Connection.connect``.
        """
        return cls(Connection.connect(path, timeout_s, client), on_progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; operations go on."""
        self.connection.close()

    @property
    def role(self) -> str:
        """What the sidecar lets this user do: ``viewer``, ``operator`` or ``admin``."""
        return str(self.connection.hello.get("role", ""))

    # ---- reads

    def status(self, fresh: bool = False) -> api.StatusDocument:
        """Backend, config and policies as the ranks report them; ``fresh`` asks them now."""
        return self._read(api.StatusRequest(fresh=fresh), api.StatusDocument)

    def idle(self) -> api.IdleDocument:
        """Every counter of every rank, and what blocks."""
        return self._read(api.IdleRequest(), api.IdleDocument)

    def ranks(self) -> api.RanksDocument:
        """Connected ranks with their capabilities."""
        return self._read(api.RanksRequest(), api.RanksDocument)

    def backends(self) -> api.BackendsDocument:
        """Known backends, their options, and what is missing on the engine's host."""
        return self._read(api.BackendsRequest(), api.BackendsDocument)

    def operations(self) -> api.OperationsDocument:
        """Operations that run or ran lately."""
        return self._read(api.OperationsRequest(), api.OperationsDocument)

    def operation(self, operation_id: str) -> api.OperationDocument:
        """One operation."""
        return self._read(api.OperationsRequest(operation_id=operation_id), api.OperationDocument)

    def history(self) -> api.HistoryDocument:
        """Revisions with who, when, why and how."""
        return self._read(api.HistoryRequest(), api.HistoryDocument)

    def failover(self) -> FailoverDocument:
        """Failover policies and where they stand."""
        return self._read(FailoverRequest(), FailoverDocument)

    def watch(
        self, last_event_id: int | None = None, quiet_timeout_s: float | None = None
    ) -> Iterator[api.EventDocument]:
        """A snapshot, then numbered events. ``quiet_timeout_s`` bounds the silence between two (None: no bound)."""
        for data in self.connection.stream(api.WatchRequest(last_event_id=last_event_id), quiet_timeout_s):
            yield msgspec.convert(data, api.EventDocument)

    # ---- changes

    def attach(self, backend: str, config: str | None = None, **options: Any) -> api.OperationAnswer:
        """Attach ``backend``; ``config`` is the extra config string, ``options`` are fields of ``AttachRequest``."""
        request = api.AttachRequest(
            hicache_storage_backend=backend, hicache_storage_backend_extra_config_json=config, **options
        )
        return self._change(request, api.OperationAnswer)

    def swap(self, backend: str, config: str | None = None, **options: Any) -> api.OperationAnswer:
        """Replace what is attached, in one operation."""
        return self.attach(backend, config, swap=True, **options)

    def detach(self, **options: Any) -> api.OperationAnswer:
        """Stop using L3; idempotent."""
        return self._change(api.DetachRequest(**options), api.OperationAnswer)

    def policy(
        self,
        prefetch_policy: str | None = None,
        write_policy: str | None = None,
        knobs: dict[str, KnobValue] | None = None,
        **options: Any,
    ) -> api.OperationAnswer:
        """Change live keys of what is attached."""
        request = api.PolicyRequest(
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_write_policy=write_policy,
            knobs=knobs or {},
            **options,
        )
        return self._change(request, api.OperationAnswer)

    def rollback(self, revision: int, **options: Any) -> api.OperationAnswer:
        """Go back to the state of ``revision``."""
        return self._change(api.RollbackRequest(revision=revision, **options), api.OperationAnswer)

    def resolve(self, how: str, reason: str = "") -> api.OperationAnswer:
        """After drift: ``adopt`` what the ranks have, or ``reapply`` what is desired."""
        return self._change(api.ResolveRequest(how=how, reason=reason), api.OperationAnswer)

    def cancel(self, operation_id: str) -> api.OperationDocument:
        """Cancel an operation; the old state is restored."""
        return self._read(api.CancelRequest(operation_id=operation_id), api.OperationDocument)

    def bypass(self, enabled: bool) -> api.BypassAnswer:
        """Reads miss and writes are skipped while on; works under load."""
        return self._read(api.BypassRequest(enabled=enabled), api.BypassAnswer)

    def drain(self, timeout_s: float = 30.0, hold_s: float = 300.0, reason: str = "") -> api.DrainAnswer:
        """Close admission and wait up to ``timeout_s`` for idle; it reopens by itself after ``hold_s``."""
        return self._change(api.DrainRequest(timeout_s=timeout_s, hold_s=hold_s, reason=reason), api.DrainAnswer)

    def resume(self) -> api.DrainAnswer:
        """Open admission again."""
        return self._read(api.ResumeRequest(), api.DrainAnswer)

    def clear(self, confirm: str, timeout_s: float = api.DEFAULT_TIMEOUT_S) -> api.ClearAnswer:
        """Delete the pages of namespace ``confirm`` from the attached store."""
        return self._change(api.ClearRequest(confirm=confirm, timeout_s=timeout_s), api.ClearAnswer)

    def set_failover(
        self,
        policies: Mapping[str, FailoverPolicy | None] | None = None,
        *,
        keep_others: bool = False,
        release: bool = False,
        reason: str = "",
    ) -> FailoverDocument:
        """Set failover policies (None removes one, with ``keep_others``), or release a hold."""
        request = SetFailoverRequest(
            policies=None if policies is None else dict(policies),
            keep_others=keep_others,
            release=release,
            reason=reason,
        )
        return self._read(request, FailoverDocument)

    def _read(self, request: Any, document: type[T]) -> T:
        return msgspec.convert(self.connection.call(request, REQUEST_TIMEOUT_S, self.on_progress), document)

    def _change(self, request: Any, document: type[T]) -> T:
        budget_s = request.timeout_s + getattr(request, "wait_timeout_s", 0.0) + GRACE_S
        return msgspec.convert(self.connection.call(request, budget_s, self.on_progress), document)
