"""A Python child for what may hang or end its process: asked of a vendor's library before the engine asks it itself.

It has a deadline and dies with the process that started it, however that ends (F111): a probe that hangs in a driver
would outlive every crash of its engine. What it is given comes by standard input, since a command line is everybody's
to read (F94).
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

# PR_SET_PDEATHSIG is of the *thread* that starts the child: ``ask`` waits in it, so that it cannot end before.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    os._exit(1)  # it ended before the call
"""


def ask(
    code: str, arguments: Sequence[str], text: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[str, int] | None:
    """Run ``code`` in a fresh interpreter; blocks until it ended or was killed.

    Args:
        arguments: ``sys.argv[1:]`` there; never secrets.
        text: its standard input.
        timeout_s: seconds after which it is killed.
        env: its environment; None: ours, without the variable that starts an engine's hooks.

    Returns:
        What it printed and its exit code (negative: the signal); None when time ran out.

    Raises:
        OSError: no process can be started.
    """
    around = dict(os.environ if env is None else env)
    around.pop("HICACHE_SIDECAR", None)  # a child is no engine
    # -P: the engine's working directory is no place to import from.
    command = [sys.executable, "-P", "-c", _TIED + code, str(os.getpid()), *arguments]
    try:
        done = subprocess.run(
            command, env=around, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=timeout_s, check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace"), done.returncode
