"""Start-up of the client: ``hicachectl status`` beside ``python -c "import msgspec"``, whole processes, interleaved."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rigs.procs import Processes

ROUNDS = 31
TARGET = "<= 2.0x"  # of the wall time of importing msgspec


def wall_ms(argv: list[str]) -> float:
    """Wall time of one process, output thrown away."""
    begun = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False)
    return (time.perf_counter() - begun) * 1000


def run() -> list[dict[str, Any]]:
    """One row; the sidecar is real, no engine is connected (a status with ranks prints a few lines more)."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder, Processes(Path(folder)) as processes:
        sidecar = processes.sidecar()
        script = Path(sys.executable).with_name("hicachectl")
        program = [str(script)] if script.exists() else [sys.executable, "-m", "hicache_sidecar.cli.main"]
        status = [*program, "--socket", sidecar.socket, "status"]
        code = subprocess.run(status, capture_output=True, check=False).returncode
        if code != 6:  # answered, and no engine
            raise RuntimeError(f"hicachectl status: exit code {code}, expected 6")
        empty = [sys.executable, "-c", "import msgspec"]
        ours, theirs = [], []
        wall_ms(empty)
        for _ in range(ROUNDS):
            theirs.append(wall_ms(empty))
            ours.append(wall_ms(status))
    return [
        {
            "name": "hicachectl status, whole process",
            "value": statistics.median(ours),
            "unit": "ms",
            "comparison": statistics.median(theirs),
            "compared_with": 'python -c "import msgspec"',
            "target": TARGET,
        }
    ]
