"""A sidecar that stops working at a given point: ``python -m tests.hooks.peer ENDPOINT PHASE LEASE_S``.

Takes one rank up to ``PHASE`` (``prepare``, ``freeze``, ``drain``, ``commit``, ``hold``) with short leases, says so on
stdout, and then does nothing any more, until it is killed or stopped.
"""

import signal
import sys

from tests.hooks.driver import FILE
from tests.hooks.router import Router

from hicache_proto.hooklink import Commit, Freeze, Hold, Prepare


def main(endpoint: str, phase: str, lease_s: float) -> None:
    """Play."""
    with Router(endpoint) as sidecar:
        sidecar.welcome()
        if phase == "hold":
            assert sidecar.ask(Hold(name="drain", hold_s=lease_s)).ok
        else:
            assert sidecar.ask(Prepare(target=FILE, prepared_s=lease_s if phase == "prepare" else 30.0), 1).ok
        if phase == "drain":
            sidecar.call(Freeze(round=1, freeze_s=lease_s, drain=True), 1)
            sidecar.beat(op_phase="draining")
        if phase in ("freeze", "commit"):
            assert sidecar.ask(Freeze(round=1, freeze_s=lease_s if phase == "freeze" else 30.0), 1).ok
        if phase == "commit":
            assert sidecar.ask(Commit(in_doubt_s=lease_s), 1).ok
        print("reached", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
