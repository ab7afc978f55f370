"""A blocking client of the control socket, and looks at a running sidecar from outside."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.rigs.procs import Sidecar, http_json

from hicache_proto import control
from hicache_proto.framing import HEADER, encode_frame


class Client:
    """A blocking control connection with raw frames."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(path)
        self._file = self.sock.makefile("rb")
        self.send(control.ClientHello(protocol=1, client="test"))
        self.hello = self.read()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()

    def send(self, frame: control.ClientFrame) -> None:
        self.sock.sendall(encode_frame(control.encode(frame)))

    def read(self) -> control.ServerFrame | None:
        header = self._file.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        return control.decode_server_frame(self._file.read(HEADER.unpack(header)[0]))

    def ask(self, body: Any, ident: int = 1) -> control.ServerFrame | None:
        self.send(control.Request(id=ident, body=body))
        while isinstance(frame := self.read(), control.Progress):
            continue
        return frame


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def metric(sidecar: Sidecar, prefix: str) -> float:
    _, text = http_json("GET", f"{sidecar.url}/metrics")
    return sum(float(line.split()[-1]) for line in str(text).splitlines() if line.startswith(prefix))


def start_and_fail(root: Path, *flags: str, timeout_s: float = 20, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a sidecar that must refuse to start."""
    return subprocess.run(
        [sys.executable, "-m", "hicache_sidecar.daemon.main", *flags],
        capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environ}, cwd=root,
    )  # fmt: skip
