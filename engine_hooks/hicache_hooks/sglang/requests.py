"""SGLang's request types as ``held`` needs them. Imported only inside the engine."""

from typing import Any

import msgspec
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.mm_utils import discard_shm_features, has_shm_features
from sglang.srt.managers.utils import is_health_check_generate_req

_BATCH = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)
_WORK = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput, *_BATCH)


class SchedulerRequests:
    """``EngineRequests`` of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def is_work(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return isinstance(request, _WORK)

    def batch_of(self, request: Any) -> list[Any] | None:
        """See ``EngineRequests``."""
        return list(request.batch) if isinstance(request, _BATCH) else None

    def with_batch(self, request: Any, members: list[Any]) -> Any:
        """See ``EngineRequests``; ``rids`` runs parallel to the batch."""
        changes: dict[str, Any] = {"batch": members}
        if request.rids is not None:
            changes["rids"] = [member.rid for member in members]
        return msgspec.structs.replace(request, **changes)

    def is_abort(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return isinstance(request, AbortReq)

    def is_health_check(self, request: Any) -> bool:
        """See ``EngineRequests``."""
        return bool(is_health_check_generate_req(request))

    def answer_abort(self, held: Any, abort: Any) -> None:
        """See ``EngineRequests``. The engine keeps no state of it yet: the answer to its client is all."""
        if has_shm_features([held]):
            discard_shm_features(held)
        message = AbortReq(rid=held.rid, finished_reason=abort.finished_reason)
        scheduler = self._scheduler
        if hasattr(scheduler, "send_abort_output"):  # since 0.5.21; knows the Rust server's ring
            scheduler.send_abort_output(message, held)
        else:
            scheduler.ipc_channels.send_to_tokenizer.send_output(message, held)

    def answer_health(self, request: Any) -> None:
        """See ``EngineRequests``: the engine sends a heartbeat to these at its next result, or when it is idle."""
        self._scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
