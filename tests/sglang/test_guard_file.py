"""The guard around SGLang's own `file` object, in SGLang's environment and without a server."""

import json
import subprocess
from pathlib import Path

from tests.rigs.sglang_server import RIG, Fleet, rig_python

PAGE_BYTES = 4 * 4096


def test_the_guard_around_the_engines_own_file_store(fleet: Fleet, tmp_path: Path) -> None:
    """F38, F91: bytes go through unchanged, the engine takes it for the store's class, trouble reads as a miss."""
    done = subprocess.run(
        [str(rig_python()), str(RIG / "guard_file.py"), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{RIG / 'stubs'}:{fleet.hooks}"},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["name"], found["is_file"], found["is_storage"]) == ("HiCacheFile", True, True)
    assert (found["path"], found["layout"], found["forgotten"]) == (str(tmp_path), False, [])
    assert (found["written"], found["there"], found["v2"], found["equal"]) == (True, 8, 8, True)
    assert found["short"] == [False] * 8  # HiCacheFile raises for the whole batch
    assert found["bypassed"] == [0, False]
    assert found["usage"] == {
        "put": [8, 0, 0, 1, 8 * PAGE_BYTES],
        "get": [8, 0, 8, 0, 8 * PAGE_BYTES],
        "exists": [16, 2, 0, 8, 0],
    }
    assert found["closed"] == [True, 0, 8]
