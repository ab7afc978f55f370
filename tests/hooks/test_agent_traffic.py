"""How much an agent says: an operation's answers are its heartbeats, and a wake-up is asked for once.

With 256 ranks a heartbeat beside each answer was a third of all messages, and each wake-up is a system call that
lets go of the interpreter in the middle of a scheduler's step.
"""

import os
import threading
from pathlib import Path

import pytest
from tests.hooks.driver import FILE
from tests.hooks.router import Router
from tests.rigs.light_rank import LightRank

from hicache_proto.hooklink import Answer, AskReport, Commit, Finalize, Freeze, Heartbeat, Prepare


def test_an_operation_beats_only_where_nothing_is_answered(tmp_path: Path) -> None:
    """PREPARING and FINAL are news before their answers; what an answer says is not said again beside it."""
    endpoint = f"ipc://{tmp_path}/hooks.sock"
    with Router(endpoint, heartbeat_s=60) as sidecar:
        rank = LightRank(endpoint, incarnation="i1")
        try:
            sidecar.welcome()
            for body in (Prepare(target=FILE, prepared_s=30), Freeze(round=1, freeze_s=5), Commit(in_doubt_s=10)):
                assert sidecar.ask(body, 1).ok
            assert sidecar.ask(Finalize(), 1).report.op_ended == "final"
            assert sidecar.ask(AskReport()).ok
            beats = [m.report.op_phase for _, m in sidecar.kept if isinstance(m, Heartbeat)]
            assert beats in ([], ["preparing"], ["none"], ["preparing", "none"])
        finally:
            rank.close()


def test_no_wake_up_is_lost_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is asked for while the agent takes the one before: it goes out, and so does the next after a pause."""
    endpoint = f"ipc://{tmp_path}/hooks.sock"
    read = os.eventfd_read
    with Router(endpoint, heartbeat_s=60) as sidecar:
        rank = LightRank(endpoint, incarnation="i1")
        agent = rank.hook.agent
        armed = threading.Event()

        def read_and_post(fd: int) -> int:
            if not armed.is_set():
                return read(fd)
            armed.clear()
            agent.answer(call, ok=True)
            count = read(fd)
            agent.answer(call, ok=True)
            return count

        monkeypatch.setattr("hicache_hooks.agent.os.eventfd_read", read_and_post)
        try:
            sidecar.welcome()
            call = sidecar.call(AskReport())
            sidecar.expect(Answer, call=call.call)
            for _ in range(20):
                armed.set()
                agent.answer(call, ok=True)
                for _ in range(3):
                    sidecar.expect(Answer, call=call.call)
                agent.notice("drift", "after a pause")
                sidecar.notice("drift")
        finally:
            rank.close()
