"""Notices the engine's own PUT, DELETE and clear of storage: changes made behind the sidecar's back.

They reach every rank by the engine's broadcast and its dispatcher; there their handlers are wrapped, so that each rank
compares what it runs before and after, and tells the sidecar at once. The sidecar shows the difference as drift and
touches nothing. A PUT of the same backend over ours changes policies only: the comparison sees that too.

While an operation of the sidecar holds this world (admission closed, or already switched), such a call is refused:
the state that it would change is being decided. All ranks of a world enter and leave these phases in the same
iteration, so that all of them refuse or none: a one-sided attach would hang the engine in its collectives. Data
parallel replicas may differ for a moment; the engine then answers with each replica's own result, as it always does.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from hicache_hooks.sglang.ours import is_ours
from hicache_proto.model import EffectiveState
from hicache_proto.transaction import RankPhase

log = logging.getLogger(__name__)

HELD = (RankPhase.DRAINING, RankPhase.FROZEN, RankPhase.SWITCHED)  # entered and left by broadcast commands alone
REFUSAL = "Reject {what}: operation {n} of hicache-sidecar is in progress"

Handler = Callable[[Any], Any]


class Hook(Protocol):
    """What is used of a ``RankHook``."""

    transaction: Any

    def report(self) -> Any: ...

    def note_drift(self, detail: str) -> None: ...


def install(scheduler: Any, hook: Hook) -> list[str]:
    """Wrap the engine's three handlers in ``scheduler``'s dispatcher; returns what could not be wrapped, by name."""
    from sglang.srt.managers import io_struct

    wanted = (
        ("attach", "AttachHiCacheStorageReqInput", "AttachHiCacheStorageReqOutput"),
        ("detach", "DetachHiCacheStorageReqInput", "DetachHiCacheStorageReqOutput"),
        ("clear", "ClearHiCacheReqInput", None),
    )
    problems = []
    mapping = scheduler._request_dispatcher._mapping
    for what, request, answer in wanted:
        kind = getattr(io_struct, request, None)
        if kind is None or kind not in mapping:
            problems.append(f"drift: this engine has no {request} handler")
            continue
        refused = None if answer is None else getattr(io_struct, answer)
        mapping[kind] = watched(mapping[kind], what, hook, refused)
    return problems


def watched(handler: Handler, what: str, hook: Hook, refused: Callable[..., Any] | None) -> Handler:
    """``handler``, told about. ``refused`` makes the engine's answer of a refusal; None: it is never refused."""

    def handle(request: Any) -> Any:
        if is_ours():
            return handler(request)
        record = hook.transaction.record
        if refused is not None and record.phase in HELD:
            message = REFUSAL.format(what=what, n=record.n)
            log.warning("%s", message)
            return refused(success=False, message=message)
        before = _state(hook)
        answer = handler(request)
        try:
            _compare(hook, what, before, _state(hook), bool(getattr(answer, "success", False)))
        except Exception:
            log.exception("the engine's own %s could not be looked at", what)
        return answer

    return handle


def _state(hook: Hook) -> EffectiveState | None:
    try:
        state: EffectiveState = hook.report().state
    except Exception:
        log.exception("the present state could not be read")
        return None
    return state


def _compare(hook: Hook, what: str, before: EffectiveState | None, after: EffectiveState | None, done: bool) -> None:
    if what == "clear":
        if done:
            hook.note_drift("the engine's own clear deleted the attached store's pages")
        return
    if before == after and before is not None:
        return
    detail = f"the engine's own {what}: storage backend {_named(before)} -> {_named(after)}"
    if before is not None and after is not None and before.backend == after.backend:
        detail = f"the engine's own {what} changed policies or options of {_named(after)}"
    log.warning("%s", detail)
    hook.note_drift(detail)


def _named(state: EffectiveState | None) -> str:
    return "unknown" if state is None else (state.backend or "none")
