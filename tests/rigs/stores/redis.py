"""Stand of ``redis``: a real redis-server on a free port, with a password; small: ``maxmemory`` without eviction."""

import shutil
import socket
from typing import Any

from tests.rigs.procs import free_port
from tests.rigs.stores.base import ServerStand, Stand

from hicache_hooks.backends import redis as backend

PASSWORD = "a test's p@ssword"
PAGE = 64 << 10


class RedisStand(ServerStand):
    """See the module's text."""

    backend_name = "redis"
    outlives_server = False  # no persistence
    can_be_small = True
    dead_call_s = 4.0
    timeout_s = 2.0

    @staticmethod
    def missing() -> str | None:
        if shutil.which("redis-server") is None:
            return "no redis-server (package redis-server)"
        return "; ".join(backend.missing()) or None

    def start(self) -> None:
        if self._starts == 0:
            self.port = free_port()
            (self.root / "redis").mkdir()
            (self.root / "secrets").mkdir()
            (self.root / "secrets" / "password").write_text(PASSWORD + "\n")
        super().start()

    def argv(self) -> list[str]:
        # Redis counts its own 1 MB and its overhead per page too.
        limit = (self.small_pages * PAGE * 5 // 4) + (2 << 20)
        small = ["--maxmemory", str(limit), "--maxmemory-policy", "noeviction"] if self.small else []
        return [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no",
            "--dir", str(self.root / "redis"), "--requirepass", PASSWORD, "--daemonize", "no", *small,
        ]  # fmt: skip

    def _ask(self, *commands: list[str | bytes]) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 2.0) as connection:
            for words in ([b"AUTH", PASSWORD.encode()], *commands):
                raw = [word.encode() if isinstance(word, str) else word for word in words]
                parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)
                connection.sendall(b"*%d\r\n%s" % (len(raw), parts))
                answer = connection.recv(4096)
            return answer

    def ready(self) -> bool:
        try:
            return self._ask(["PING"]) == b"+PONG\r\n"
        except OSError:
            return False

    def config(self) -> dict[str, Any]:
        return {
            "url": f"redis://127.0.0.1:{self.port}/0", "password_file": str(self.root / "secrets" / "password"),
            "timeout_s": self.timeout_s,
        }  # fmt: skip

    def env(self) -> dict[str, str]:
        return {"HICACHE_CONFIG_DIRS": str(self.root / "secrets")}

    def shorten(self, key: str, namespace: str) -> bool:
        return self._ask(["SET", f"hicache:{key}", bytes(PAGE // 2)]) == b"+OK\r\n"


def stand_class(variant: str) -> type[Stand]:
    """The one there is."""
    return RedisStand
