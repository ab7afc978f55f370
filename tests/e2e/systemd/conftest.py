"""A real systemd of our own (tests/rigs/private-systemd) with the units of this repository, booted once per module.

The unit runs this checkout under the hardening that it ships with. Its user reaches neither the virtual environment
nor a Python below the root home, so the drop-in binds both to /opt inside the service's name space.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RIG = ROOT / "tests" / "rigs" / "private-systemd"
UNITS = ROOT / "systemd"
ROOTS = ("proto", "sidecar", "engine_hooks")
DEADLINE_S = 30.0

DROP_IN = """\
[Service]
ExecStart=
ExecStart=/opt/hicache-python/bin/{python} -m hicache_sidecar.daemon.main --config {config}
BindReadOnlyPaths={base}:/opt/hicache-python {site}:/opt/hicache-site {binds}
Environment=LD_LIBRARY_PATH=/opt/hicache-python/lib PYTHONDONTWRITEBYTECODE=1
Environment=PYTHONPATH=/opt/hicache-site:{path}
"""


def drop_in(config: str) -> str:
    """The service of the checkout instead of an installed one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return DROP_IN.format(
        python=version,
        config=config,
        base=sys.base_prefix,
        site=sysconfig.get_paths()["platlib"],
        binds=" ".join(f"{ROOT / name}:/opt/hicache-src/{name}" for name in ROOTS),
        path=":".join(f"/opt/hicache-src/{name}" for name in ROOTS),
    )


class Rig:
    """Commands inside the private systemd."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(RIG), "exec", str(self.state), *command], capture_output=True, text=True, timeout=60, cwd="/"
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.journal()}"
            )
        return done.stdout

    def journal(self, unit: str = "hicache-sidecar.service", *flags: str) -> str:
        done = subprocess.run(
            [str(RIG), "exec", str(self.state), "journalctl", "--no-pager", "-u", unit, *flags],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout

    def show(self, prop: str, unit: str = "hicache-sidecar.service") -> str:
        return self.run("systemctl", "show", "-P", prop, unit).strip()

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """A file inside the rig's own root."""
        subprocess.run(
            [str(RIG), "exec", str(self.state), "install", "-D", "-m", mode, "/dev/stdin", path],
            input=text, text=True, check=True, timeout=60,
        )  # fmt: skip

    def until(self, what: str, ready: Callable[[], bool]) -> None:
        """Poll with a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline, f"no {what}:\n{self.journal()}"
            time.sleep(0.1)

    def control(self, path: str = "/run/hicache-sidecar/control.sock", user: str = "root") -> str:
        """The state that ``status`` shows, asked by ``user`` over the control socket; "" when closed unread."""
        helper = str(Path(__file__).with_name("ask.py"))
        as_user = [] if user == "root" else ["setpriv", f"--reuid={user}", "--clear-groups"]
        return self.run(*as_user, "/usr/bin/python3", "-I", helper, path, check=False).strip()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A booted systemd with our units, users and configuration."""
    work = tmp_path_factory.mktemp("rig")
    units = work / "units"
    shutil.copytree(UNITS, units)
    for name, config in (("hicache-sidecar", "sidecar"), ("hicache-sidecar@", "%i")):
        folder = units / f"{name}.service.d"
        folder.mkdir()
        (folder / "checkout.conf").write_text(drop_in(f"/etc/hicache-sidecar/{config}.toml"))
    state = Path(f"/var/tmp/hicache-rig.{os.getpid()}")  # not below /tmp: the rig mounts its own there
    booted = Rig(state)
    binds = [flag for path in {str(ROOT), sys.base_prefix, sys.prefix} if path != "/usr" for flag in ("--bind", path)]
    try:
        subprocess.run([str(RIG), "start", str(state), "--units", str(units), *binds], check=True, timeout=60)
        booted.run("systemd-sysusers", "/etc/systemd/system/sysusers.d/hicache-sidecar.conf")
        booted.run("systemd-tmpfiles", "--create", "/etc/systemd/system/tmpfiles.d/hicache-sidecar.conf")
        booted.run("install", "-m", "640", "-g", "hicache", str(UNITS / "sidecar.toml"), "/etc/hicache-sidecar/")
        yield booted
    finally:
        subprocess.run([str(RIG), "stop", str(state)], check=False, timeout=60)
        shutil.rmtree(state, ignore_errors=True)
