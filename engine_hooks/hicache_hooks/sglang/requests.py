"""SGLang's request types as ``held`` needs them."""

import importlib
from typing import Any

import msgspec

from hicache_hooks.sglang.versions import SRT


class SchedulerRequests:
    """``EngineRequests`` of one scheduler. Made inside the engine alone."""

    def __init__(self, scheduler: Any) -> None:
        """
        Raises:
            ImportError, AttributeError: this engine has other types.
        """
        types = importlib.import_module(f"{SRT}.managers.io_struct")
        self._scheduler = scheduler
        self._abort_type: Any = types.AbortReq
        self._batch = (types.BatchTokenizedGenerateReqInput, types.BatchTokenizedEmbeddingReqInput)
        self._work = (types.TokenizedGenerateReqInput, types.TokenizedEmbeddingReqInput, *self._batch)
        self._is_health = importlib.import_module(f"{SRT}.managers.utils").is_health_check_generate_req
        self._multimodal = importlib.import_module(f"{SRT}.managers.mm_utils")

    def is_work(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return isinstance(request, self._work)

    def batch_of(self, request: Any) -> list[Any] | None:
        """See ``EngineRequests``."""
        return list(request.batch) if isinstance(request, self._batch) else None

    def with_batch(self, request: Any, members: list[Any]) -> Any:
        """See ``EngineRequests``; ``rids`` runs parallel to the batch."""
        changes: dict[str, Any] = {"batch": members}
        if request.rids is not None:
            changes["rids"] = [member.rid for member in members]
        return msgspec.structs.replace(request, **changes)

    def is_abort(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return isinstance(request, self._abort_type)

    def is_health_check(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return bool(self._is_health(request))

    def answer_abort(self, held: Any, abort: Any) -> None:
        """See ``EngineRequests``. The engine keeps no state of it yet: the answer to its client is all."""
        if self._multimodal.has_shm_features([held]):
            self._multimodal.discard_shm_features(held)
        message = self._abort_type(rid=held.rid, finished_reason=abort.finished_reason)
        scheduler = self._scheduler
        if hasattr(scheduler, "send_abort_output"):  # since 0.5.21; knows the Rust server's ring
            scheduler.send_abort_output(message, held)
        else:
            scheduler.ipc_channels.send_to_tokenizer.send_output(message, held)

    def answer_health(self, request: Any) -> None:
        """See ``EngineRequests``: the engine sends a heartbeat to these at its next result, or when it is idle."""
        self._scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
