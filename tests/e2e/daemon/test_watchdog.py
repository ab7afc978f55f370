"""The real daemon and its watchdog: pings go on while an operation takes its time (F108)."""

import socket
import threading

from tests.rigs.procs import Processes, http_json, http_ok
from tests.rigs.stub_engine import StubEngine

BACKEND = "/hicache/storage-backend"
PING_S = 0.1  # half of the interval that the daemon is given
WAIT_S = 2.0  # how long the operation takes: 20 intervals of the real thing


def test_pings_go_on_through_a_long_operation(processes: Processes) -> None:
    """F108: an operation that waits many intervals costs no ping: it never holds the loop, whatever its length."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(processes.root / "notify"))
        manager.settimeout(20)
        sidecar = processes.sidecar(
            NOTIFY_SOCKET=str(processes.root / "notify"), WATCHDOG_USEC=str(int(PING_S * 2e6)), WATCHDOG_PID=""
        )
        with StubEngine(sidecar.endpoint, dp=2) as stub:
            sidecar.process.wait_until("/readyz", lambda: http_ok(f"{sidecar.url}/readyz"), 20)
            stub.ranks[1].set(counters={"running_batch": 1})
            answers: list[int] = []
            body = {"hicache_storage_backend": "file", "wait_timeout_s": WAIT_S}
            client = threading.Thread(
                target=lambda: answers.append(http_json("PUT", sidecar.url + BACKEND, body, timeout_s=60)[0])
            )
            _ended(manager)
            client.start()
            pings = 0
            while not answers:
                pings += manager.recv(4096) == b"WATCHDOG=1"
            client.join()
    assert answers == [400]
    # 20 are due; a busy machine may be late with some, a loop that waits for the operation sends none.
    assert pings >= WAIT_S / PING_S / 4


def _ended(manager: socket.socket) -> None:
    """Take what was sent before."""
    manager.setblocking(False)
    try:
        while True:
            manager.recv(4096)
    except BlockingIOError:
        manager.settimeout(20)
