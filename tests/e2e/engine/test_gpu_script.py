"""The GPU script itself: plain about a missing device, and its steps hold on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "gpu" / "check.py"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=110, check=False
    )


def test_without_a_device_it_says_so_and_checks_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: run tests/gpu/check.py itself")
    ended = run()
    assert ended.returncode == 3
    assert "no CUDA device" in ended.stderr
    assert ended.stdout == ""


def test_its_steps_hold_on_the_cpu() -> None:
    ended = run("--device", "cpu", "--cycles", "6", "--swaps", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "FAIL" not in ended.stdout
    assert "all passed" in ended.stdout
