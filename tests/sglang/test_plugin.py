"""SGLang's own plugin loader and our entry point, without a server: when it hooks, and that it never stops a start."""

import json
import subprocess
from typing import Any

import pytest
from tests.rigs.sglang_server import RIG, Fleet, rig_python


@pytest.fixture(scope="module")
def loads(fleet: Fleet) -> dict[str, Any]:
    """Each load: targets that were hooked, and what was logged."""
    done = subprocess.run(
        [str(rig_python()), str(RIG / "plugin_loads.py")],
        env={"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{RIG / 'stubs'}:{fleet.hooks}",
             "HICACHE_SIDECAR": "ipc:///nowhere"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_without_a_sidecar_nothing_is_hooked_or_imported(loads: dict[str, Any]) -> None:
    """``HICACHE_SIDECAR`` unset: our entry point ran, and left no trace in the engine."""
    assert loads["unset"] == [[], [], ["hicache_hooks.sglang.plugin"]]


def test_with_one_every_hook_takes(loads: dict[str, Any]) -> None:
    """The scheduler's three, and the frontend's; each present function is a wrapper afterwards."""
    hooked, logged, not_hooked = loads["whole"]
    assert [target.split(".")[-2:] for target in hooked] == [
        ["Scheduler", "__init__"],
        ["SchedulerRequestReceiver", "_pull_raw_reqs"],
        ["TokenizerManager", "__init__"],
        ["StorageBackendFactory", "create_backend"],
    ]
    assert (logged, not_hooked) == ([], [])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no entry point", "hicache_hooks"),
        ("broken import", "the engine serves without a sidecar"),
        ("old", "SGLang 0.5.19 is older than 0.5.20"),
        ("no pull", "_pull_raw_reqs"),
    ],
)
def test_what_cannot_be_hooked_is_told_and_never_half_hooked(loads: dict[str, Any], case: str, said: str) -> None:
    """A package that cannot be imported, an old engine, one without a seam: a line says why, and the start goes on."""
    hooked, logged = loads[case]
    assert hooked == []
    assert any(said in text for text in logged), logged


def test_the_engines_own_list_of_plugins_counts(loads: dict[str, Any]) -> None:
    """``SGLANG_PLUGINS`` without our name: not loaded."""
    assert loads["not named"][0] == []
