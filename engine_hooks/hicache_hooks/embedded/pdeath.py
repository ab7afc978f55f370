"""A child that ends when its parent does, however that ends (F111)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, signum: int = signal.SIGTERM) -> None:
    """Have the kernel send ``signum`` to this process when its parent's thread ends.

    Raises:
        OSError: the kernel refuses.
        ProcessLookupError: the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it ended before the call
        raise ProcessLookupError(f"parent {parent_pid} is gone")
