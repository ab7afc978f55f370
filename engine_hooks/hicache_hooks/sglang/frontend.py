"""The hook in the process that answers SGLang's HTTP API: keeps its ``GET /hicache/storage-backend`` true.

The engine shows there what its tokenizer process believes, which only its own PUT and DELETE change. So this process
says hello to the sidecar as ``frontend``: no rank, no state of ours; it is told what the ranks run and writes it into
the engine's own configuration record, as the engine's PUT does.

``--tokenizer-worker-num`` above 1: the HTTP workers are other processes, in which the engine loads no plugins. GET
cannot follow there. Every answer to a change says so (``limits``); it touches nothing else.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from hicache_hooks.agent import LinkAgent
from hicache_proto.errors import HicacheError, Internal, UnsupportedByEngine
from hicache_proto.hooklink import AskReport, Call, RankHello, SetView
from hicache_proto.model import Capabilities, RankIdentity, RankReport, TargetState
from hicache_proto.version import PROTOCOL_VERSION

log = logging.getLogger(__name__)

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
SOURCE = "hicache_hooks"  # in the engine's own record of configuration changes
WORKERS_LIMIT = "--tokenizer-worker-num above 1: the engine's GET /hicache/storage-backend cannot follow the sidecar"

Record = Callable[..., None]  # TokenizerManager.record_config_updates(source, **fields)


class Frontend:
    """One tokenizer process. ``start`` once; nothing here raises into the engine."""

    def __init__(
        self, record: Record, endpoint: str, *, engine_id: str, incarnation: str, start: bool = True, **agent: Any
    ) -> None:
        """Args:
        record: takes ``(source, **fields)`` and makes the engine's view show the fields.
        incarnation: the same as the ranks'. agent: further arguments of ``LinkAgent``, for tests.
        """
        self._record = record
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._shown: dict[str, str | None] | None = None
        self.agent = LinkAgent(
            endpoint,
            hello=self._hello,
            report=RankReport,
            on_call=self.deliver,
            deadline=lambda: None,
            on_deadline=lambda: None,
            **agent,
        )
        if start:
            self.agent.start()

    def deliver(self, call: Call) -> None:
        """One call of the sidecar. Agent thread."""
        error: HicacheError | None = None
        if isinstance(call.body, SetView):
            error = self._show(call.body.target)
        elif not isinstance(call.body, AskReport):
            error = UnsupportedByEngine("a frontend holds no storage", details={"reason": "frontend"})
        self.agent.answer(call, ok=error is None, error=error)

    def close(self, reason: str = "") -> None:
        """Say goodbye. Idempotent."""
        self.agent.stop(reason)

    def _show(self, target: TargetState) -> HicacheError | None:
        fields: dict[str, str | None] = {
            "hicache_storage_backend": target.backend,
            "hicache_storage_backend_extra_config": target.extra_config if target.backend else None,
        }
        # A policy that nobody named is what the engine was started with: its own view knows.
        if target.prefetch_policy is not None:
            fields["hicache_storage_prefetch_policy"] = target.prefetch_policy
        if target.write_policy is not None:
            fields["hicache_write_policy"] = target.write_policy
        try:
            self._record(SOURCE, **fields)
        except Exception as failure:
            log.exception("the engine's own view could not be set")
            return Internal(f"{type(failure).__name__}: {failure}", details={"reason": "view_failed"})
        if fields != self._shown:
            log.info("the engine's own view shows storage backend %s", target.backend)
            self._shown = fields
        return None

    def _hello(self, session: str) -> RankHello:
        return RankHello(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            session=session,
            role="frontend",
            identity=RankIdentity(),
            pid=os.getpid(),
            incarnation=self._incarnation,
            epoch=0,
            capabilities=Capabilities(engine="sglang"),
        )


def limits(scheduler: Any) -> list[str]:
    """What cannot follow in the engine of ``scheduler``, for the warnings of an answer. Any process, any thread."""
    workers = getattr(getattr(scheduler, "server_args", None), "tokenizer_worker_num", 1) or 1
    return [WORKERS_LIMIT] if workers > 1 else []


_frontends: list[Frontend] = []


def install(endpoint: str, *, engine_id: str, incarnation: str) -> None:
    """Register with SGLang's hook registry: every TokenizerManager that this process makes gets a ``Frontend``.

    For the launcher process alone; the target's module is imported by the engine's registry.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(_result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _frontends.append(
                Frontend(manager.record_config_updates, endpoint, engine_id=engine_id, incarnation=incarnation)
            )
        except Exception:
            log.exception("no frontend: the engine's own view will not follow the sidecar")

    HookRegistry.register(TARGET, after_init, HookType.AFTER)
