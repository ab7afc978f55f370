"""The unit files themselves: verified, hardened, in step with each other."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hicache_sidecar.daemon.config import load
from hicache_sidecar.daemon.settings import Settings

UNITS = Path(__file__).resolve().parents[3] / "systemd"
SERVICES = ("hicache-sidecar.service", "hicache-sidecar@.service")
MAX_EXPOSURE = 2.0

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (package systemd)"
)


@needs_analyze
def test_verify_is_clean(tmp_path: Path) -> None:
    """No warning; only the programs' paths are replaced, since nothing is installed here."""
    for unit in (*UNITS.glob("*.service"), *UNITS.glob("*.socket")):
        text = unit.read_text()
        for program in ("/usr/bin/hicache-sidecar", "/opt/sglang/bin/python"):
            text = text.replace(program, "/bin/true")
        (tmp_path / unit.name).write_text(text)
    for unit in tmp_path.iterdir():
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), unit.name


@needs_analyze
@pytest.mark.parametrize("name", SERVICES)
def test_exposure_is_low(name: str) -> None:
    threshold = str(int(MAX_EXPOSURE * 10))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", str(UNITS / name)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r"exposure level for .*: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= MAX_EXPOSURE
    assert done.returncode == 0


def test_template_differs_only_in_names() -> None:
    """The two services and the two sockets are one text with %i in the names."""

    def plain(text: str) -> list[str]:
        text = re.sub(r"[@/ -]?%i\b", "", text.replace("%i.socket", ".socket").replace("@.socket", ".socket"))
        keys = ("Description=", "SyslogIdentifier=", "# Sidecar of", "ExecStart=", "# For a token")
        return [line for line in text.splitlines() if not line.startswith(keys)]

    for kind in ("service", "socket"):
        assert plain((UNITS / f"hicache-sidecar@.{kind}").read_text()) == plain(
            (UNITS / f"hicache-sidecar.{kind}").read_text()
        )


def test_example_configuration_is_all_comments_and_right(tmp_path: Path) -> None:
    """As shipped it changes nothing; with the comment signs gone every key and value is accepted."""
    text = (UNITS / "sidecar.toml").read_text()
    (tmp_path / "shipped.toml").write_text(text)
    assert load({}, {}, tmp_path / "shipped.toml") == Settings()
    (tmp_path / "all.toml").write_text(re.sub(r"(?m)^# (?=\w+ = )", "", text))
    settings = load({}, {}, tmp_path / "all.toml")
    defaults = Settings()
    assert settings.leases == defaults.leases
    assert settings.log == defaults.log
    assert (settings.http.listen, settings.on_engine_restart) == (defaults.http.listen, defaults.on_engine_restart)
    assert settings.access.users == {"alice": "operator"}
