"""Run hicachectl in this process against a scripted sidecar."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.fake_sidecar import DONE, Peer, fake_sidecar

from hicache_proto import control, errors
from hicache_sidecar.cli.main import main


class Ran:
    """One run of hicachectl."""

    def __init__(self, code: int, out: str, err: str, requests: list[control.Request]) -> None:
        self.code, self.out, self.err = code, out, err
        self.bodies = [request.body for request in requests]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ctl(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Run a command line against a sidecar that answers every request with ``answer``."""

    def run(*argv: str, answer: object = DONE) -> Ran:
        def script(peer: Peer, request: control.Request) -> None:
            if isinstance(answer, errors.HicacheError):
                peer.error(request, answer)
            elif callable(answer):
                answer(peer, request)
            else:
                peer.result(request, answer)

        path = tmp_path / "control.sock"
        path.unlink(missing_ok=True)
        with fake_sidecar(path, script) as server:
            code = main(["--socket", server.path, *argv])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err, server.requests)

    return run
