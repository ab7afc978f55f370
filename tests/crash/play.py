"""Plays one cell on a stand: bring it to the start, run the operation, strike, restart what died, look."""

import http.client
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.crash import check
from tests.crash.cells import AWAY_S, VICTIM, Act, Cell, Fault, Op, Script, plan
from tests.crash.stand import PRIMER, Stand

REACH_S = 40.0  # until the point is met: the slowest script waits for a lease of 10 s first
AFTER_ANSWER_S = 5.0  # some points lie behind the client's answer: the old set is closed off-thread
OPERATION_S = 60.0
OUTSIDE_STOPS = (Act.STOP_SIDECAR, Act.STOP_RANK)


class CellFailed(Exception):
    """What is wrong, in words."""


class Request:
    """One change in flight, as a client sees it."""

    def __init__(self, stand: Stand, method: str, path: str, body: Any) -> None:
        self.answer: tuple[int, Any] | None = None
        self._thread = threading.Thread(target=self._run, args=(stand, method, path, body), daemon=True)
        self._thread.start()

    def _run(self, stand: Stand, method: str, path: str, body: Any) -> None:
        try:
            self.answer = stand.admin(method, path, body)
        except http.client.HTTPException as error:
            self.answer = 0, {"error": {"code": "lost", "message": str(error), "details": {}}}

    def wait(self, timeout_s: float) -> tuple[int, Any]:
        self._thread.join(timeout_s)
        if self.answer is None:
            raise CellFailed(f"the client has no answer after {timeout_s:g} s")
        return self.answer


def play(stand: Stand, cell: Cell, look: ModuleType = check) -> str:
    """Run ``cell``; the letter of the outcome: "A" or "B". ``look`` is the module that fits the stand.

    Raises:
        CellFailed: the state afterwards is not what it must be.
    """
    before = _start(stand, cell.op, look)
    after = None if cell.op is Op.DETACH else stand.config()
    action, act = plan(cell.point, cell.fault)
    stand.arm(action, cell.point)
    if cell.point.script in (Script.UNDO, Script.LEASE):
        stand.arm(PRIMER)
    if cell.point.script is Script.WAIT:
        stand.load(1)
    hellos = stand.hellos() if cell.fault is Fault.LINK_CUT else 0
    request = _request(stand, cell, after)
    stopped_at = _reach(stand, cell, action, request)
    stand.requests(2, but=VICTIM if cell.fault is Fault.RANK_KILL else -1)
    _strike(stand, cell, action, act, stopped_at, hellos)
    if cell.point.script is Script.WAIT:
        stand.load(0)
    stand.requests(1)
    answer = request.wait(OPERATION_S + 20)
    why, document = look.settle(stand)
    if why:
        raise CellFailed(f"not settled after {look.RECOVERY_S:g} s: {why}; the client was told {answer}")
    stand.release()
    letter, wrong = look.problems(stand, document, {"B": after, "A": before})
    wrong += _contradicts(answer, letter)
    if wrong:
        raise CellFailed("; ".join(wrong))
    return str(letter)


def _start(stand: Stand, op: Op, look: ModuleType) -> str | None:
    """Bring the stand to where ``op`` starts; the config of A."""
    stand.release()
    if not stand.base:
        look.remember(stand)
    status = stand.status()
    if op is Op.ATTACH:
        code, answer = stand.admin("DELETE", "/hicache/storage-backend")
        config = None
    elif status.get("state") != "attached":
        config = stand.config()
        code, answer = stand.admin("PUT", "/hicache/storage-backend", _body(stand.backends[0], config))
    else:
        return str(status["desired"]["hicache_storage_backend_extra_config"])
    if code != 200:
        raise CellFailed(f"the stand could not be brought to its start: {code} {answer}")
    return config


def _body(backend: str, config: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": config,
        "timeout_s": OPERATION_S, **fields,
    }  # fmt: skip


def _request(stand: Stand, cell: Cell, config: str | None) -> Request:
    wait_s = 20.0 if cell.point.script is Script.WAIT else 0.0
    if cell.op is Op.DETACH:
        path = f"/hicache/storage-backend?timeout_s={OPERATION_S:g}&wait_timeout_s={wait_s:g}"
        return Request(stand, "DELETE", path, None)
    backend = stand.backends[cell.op is Op.SWAP]
    body = _body(backend, config, wait_timeout_s=wait_s, swap=cell.op is Op.SWAP)
    return Request(stand, "PUT", "/hicache/storage-backend", body)


def _reach(stand: Stand, cell: Cell, action: str, request: Request) -> float:
    """Wait until the point fired. Returns when the primer stopped the sidecar, or 0."""
    deadline = time.monotonic() + REACH_S
    answered = stopped_at = 0.0
    while not stand.fired(action, cell.point):
        now = time.monotonic()
        if request.answer is not None:
            answered = answered or now
        if now > deadline or (answered and now > answered + AFTER_ANSWER_S):
            raise CellFailed(f"the point was never met; the client was told {request.answer}")
        if cell.point.leaves_wait and stand.phase() == "wait":
            stand.load(0)
        if cell.point.script is Script.LEASE and not stopped_at and stand.fired(PRIMER):
            stopped_at = now
        time.sleep(0.004)
    return stopped_at


def _strike(stand: Stand, cell: Cell, action: str, act: Act, stopped_at: float, hellos: int) -> None:
    """Let the fault run its course, and start again what died. ``hellos`` of the victim before."""
    if act is not Act.NONE:
        stand.strike(act)
        stand.release()
    if action == "stop":
        stand.sidecar.process.wait_until("stop", stand.sidecar_stopped, 10)
    if action == "stop" or action.startswith("hang") or act in OUTSIDE_STOPS:
        stopped_at = stopped_at or time.monotonic()
    if cell.fault is Fault.SIDECAR_KILL:
        stand.restart_sidecar()
    elif stopped_at:
        time.sleep(max(0.0, stopped_at + AWAY_S - time.monotonic()))  # the length of the fault, not a wait for news
        stand.resume()
    if cell.fault is Fault.RANK_KILL:
        stand.restart_rank(VICTIM)
    elif cell.fault is Fault.LINK_CUT:  # the agent connects again in its own time
        _until("hello after the cut", lambda: stand.hellos() > hellos)


def _until(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + REACH_S
    while not ready():
        if time.monotonic() > deadline:
            raise CellFailed(f"no {what} within {REACH_S:g} s")
        time.sleep(0.01)


def _contradicts(answer: tuple[int, Any], letter: str) -> list[str]:
    """What the client was told must be what came true; a lost connection told nothing."""
    code, document = answer
    if code == 0:
        return []
    error = document.get("error", {})
    decided = code == 200 or error.get("details", {}).get("reason") == "converging"
    if decided != (letter == "B"):
        return [f"the client was told {code} {document}, the outcome is {letter}"]
    return []
