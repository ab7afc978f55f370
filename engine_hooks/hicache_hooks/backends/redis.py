"""Backend ``redis``: one string per page in a Redis (or Valkey) server, by redis-py.

Pages go out as they lie in the pool; answers are copied into it once, after their length was looked at. A batch is one
pipeline, cut so that no single answer is large. The client's own retries are off: with them a hung server costs 26 s
in spite of a time-out of 2 s. A cluster is not supported: the keys of a batch must lie in one server.
"""

import importlib.metadata
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Self, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from hicache_hooks.backends.base import Got, Manifest, StoreContext
from hicache_hooks.backends.options import BackendOptions, Secret, SecretFile, StoreFacts, invalid
from hicache_hooks.backends.redis_errors import RedisFailed, plain
from hicache_hooks.backends.registry import BackendSpec
from hicache_hooks.backends.secret_text import secret_of
from hicache_hooks.backends.upkeep import Upkeep, part_or_raise, stored_or_raise
from hicache_proto.model import LAYOUTS

T = TypeVar("T")
Seconds = Annotated[int, msgspec.Meta(ge=1)]

MIN_VERSION = 6
PREFIX = "hicache:"
MARKER = "hicache-epoch:"  # + namespace; no page's prefix, so clear does not take it
_EMPTYING = ("cmdstat_flushall", "cmdstat_flushdb", "cmdstat_swapdb")
BATCH_BYTES = 16 << 20  # of one pipeline or MGET: bounds what client and server hold at once
SCAN_COUNT = 1000
MAX_VALUE = 512 << 20  # Redis's own limit of a string
READ_BYTES = 1 << 20  # one receive; the client's own 64 KiB are 16 of them a page, each of which lets the lock go
CONNECT_S = 2.0
_GLOB = str.maketrans({c: f"\\{c}" for c in "*?[]\\^-"})


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class RedisOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``redis``."""

    url: Annotated[str, _doc("redis://, rediss:// or unix://, with user and database; no query", min_length=1)]
    password: Annotated[Secret | None, _doc("default none; better given as password_file")] = None
    password_file: Annotated[SecretFile | None, _doc("file that holds the password; default none")] = None
    ttl_s: Annotated[Seconds | None, _doc("seconds that a page lives after it was written; null: for ever")] = None
    timeout_s: Annotated[float, _doc("longest wait for an answer, in seconds", gt=0, le=600)] = 5.0
    ca_file: Annotated[str | None, _doc("rediss: file of certificates to trust; default the system's")] = None

    def effective(self, env: Mapping[str, str]) -> Self:
        """The password taken out of the URL, so that it is treated as the secret that it is.

        Raises:
            InvalidConfig: not such a URL, a query in it, or two passwords.
        """
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            raise invalid("url", "is no URL") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise invalid("url", "must start with redis://, rediss:// or unix://")
        if parts.query or parts.fragment:
            raise invalid("url", "must have no query: use the options")
        if parts.scheme == "unix" and not os.path.isabs(parts.path):
            raise invalid("url", "must name an absolute path after unix://")
        if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdigit():
            raise invalid("url", "must end in a database number, if anything")
        inside = unquote(parts.password or "")
        if sum(map(bool, (inside, self.password, self.password_file))) > 1:
            raise invalid("url", "has a password, or two ways to give one; use password_file alone")
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        user = f"{parts.username}@" if parts.username else ""
        bare = f"{parts.scheme}://{user}{host}{f':{port}' if port else ''}{parts.path}"
        return msgspec.structs.replace(self, url=bare, password=inside or self.password)

    def check(self, facts: StoreFacts) -> list[str]:
        """A page must be a string that Redis takes."""
        if not 1 <= facts.page_bytes <= MAX_VALUE:
            raise invalid("page_bytes", "of this engine is no length of a Redis string", "bad_geometry")
        return []


class RedisStore:
    """The ``Backend`` (see base.py)."""

    manifest: ClassVar[Manifest] = Manifest(
        name="redis",
        layouts=LAYOUTS,
        parallel_axes=("tp", "pp"),
        summary="one string per page in Redis or Valkey",
        batch_bytes=BATCH_BYTES,
        calls=1,  # the client reads under the interpreter lock: a second call only takes it away from the first
    )

    def __init__(self, options: RedisOptions, context: StoreContext, env: Mapping[str, str]) -> None:
        """``options`` must be effective ones. No I/O but the secret's file; the package is not imported."""
        self._options = options
        self._password = secret_of(options, "password", env)
        self._page_bytes = context.page_bytes
        self._prefix = f"{PREFIX}{context.namespace}."
        self._step = max(1, BATCH_BYTES // max(1, context.page_bytes))
        self._pid = os.getpid()
        self._tidy = Upkeep("redis")
        self._client: Any = None
        self._redis: Any = None
        self._marker = f"{MARKER}{context.namespace}"
        self._epoch = ""
        self._lived: tuple[str, int] | None = None  # the server's life when the marker was last there

    def open(self) -> None:
        """Connect.

        Raises:
            OSError: not reachable, or it does not let us in.
        """
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        options = self._options
        tls = {"ssl_ca_certs": options.ca_file} if options.ca_file and options.url.startswith("rediss") else {}
        wait = {} if options.url.startswith("unix") else {
            "socket_connect_timeout": min(CONNECT_S, options.timeout_s), "socket_keepalive": True
        }  # fmt: skip
        self._redis = redis
        self._pid = os.getpid()
        self._client = redis.Redis.from_url(
            options.url, password=self._password or None, socket_timeout=options.timeout_s,
            retry=Retry(NoBackoff(), 0), socket_read_size=READ_BYTES, **wait, **tls,
        )  # fmt: skip
        self._ask(lambda r: r.ping())

    def register(self, pool: memoryview) -> None:
        """Sockets need none."""

    def close(self) -> None:
        """Idempotent; waits for no answer."""
        client, self._client = self._client, None
        if client is not None and os.getpid() == self._pid:
            client.close()
            client.connection_pool.disconnect()

    # ------------------------------------------------------------ traffic

    def batch_put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """False: no room (``maxmemory``). None: the server refused this key, or failed after others were stored.

        Raises:
            OSError: the server failed, or refused keys for another reason than room, and not one page is stored.
        """
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"page buffer of {page.nbytes} bytes, expected {self._page_bytes}")
        out: list[bool | None] = []
        refused = ""
        for part in self._parts(len(keys)):
            commands = [
                ("SET", self._name(key), page, *self._ttl()) for key, page in zip(keys[part], pages[part], strict=True)
            ]
            try:
                answers = self._pipeline(commands)
            except OSError as exc:
                return stored_or_raise(out, len(keys), exc)
            for answer in answers:
                bad = isinstance(answer, Exception) and not self._full(answer)
                out.append(None if bad else answer is True or answer == b"OK")
                if bad:
                    refused = type(answer).__name__
        if refused and not any(out):
            raise RedisFailed(f"redis refused every page: {refused}")
        return out

    def batch_get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """A string of another length is a miss, and is removed.

        Raises:
            OSError: the server failed before one page was read.
        """
        out: list[Got] = []
        bad: list[str] = []
        for part in self._parts(len(keys)):
            names = [self._name(key) for key in keys[part]]
            try:
                values = self._ask(_call("mget", names))
            except OSError as exc:
                return part_or_raise(out, len(keys), exc)
            for key, value, page in zip(keys[part], values, pages[part], strict=True):
                if value is not None and len(value) == self._page_bytes:
                    page[:] = value
                    out.append(Got.HIT)
                    continue
                out.append(Got.MISS)
                if value is not None:
                    bad.append(key)
        if bad:
            self._tidy(lambda: self.delete(bad))
        return out

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """A string of another length does not count."""
        answers = self._pipeline([("STRLEN", self._name(key)) for key in keys])
        return [answer == self._page_bytes for answer in answers]

    # ------------------------------------------------------------ upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """Remove pages; missing ones are no error."""
        names = [self._name(key) for key in dict.fromkeys(keys)]
        return int(self._ask(lambda r: r.unlink(*names))) if names else self._nothing()

    def set_aside(self, key: str, reason: str) -> None:
        """Remove it."""
        name = self._name(key)
        self._ask(lambda r: r.unlink(name))

    def clear(self) -> int:
        """Delete every page of this namespace, nothing else (F68); SCAN leaves the server responsive."""
        gone = 0
        for names in self._scan():
            if names:
                gone += self._ask(_call("unlink", *names))
        self._epoch = secrets.token_hex(8)
        self._ask(lambda r: r.set(self._marker, self._epoch))  # other engines must see it too
        return gone

    def _scan(self) -> Iterator[list[bytes]]:
        pattern, prefix = self._prefix.translate(_GLOB) + "*", self._prefix.encode()
        cursor = 0
        while True:
            cursor, found = self._ask(_call("scan", cursor=cursor, match=pattern, count=SCAN_COUNT))
            yield [name for name in found if name.startswith(prefix)]
            if not cursor:
                return

    def health(self) -> dict[str, Any]:
        """Facts for status; asks the server."""
        server, memory = self._ask(lambda r: (r.info("server"), r.info("memory")))
        limit = int(memory.get("maxmemory", 0))
        used = int(memory.get("used_memory", 0))
        return {
            "inner": f"redis {server.get('redis_version', '?')}",
            "used_bytes": used,
            "max_size": limit or None,
            "eviction": memory.get("maxmemory_policy"),
            "no_space": "maxmemory" if limit and used + self._page_bytes > limit else None,
            "ttl_s": self._options.ttl_s,
        }

    def epoch(self) -> str:
        """See ``Backend``: a marker beside the pages, which a server that restarts with its data brings back.

        A marker that is gone while the server neither restarted nor was flushed was evicted alone, and is put back.

        Raises:
            OSError: the server failed, or takes no marker.
        """
        server, stats = self._ask(lambda r: (r.info("server"), r.info("commandstats")))
        lived = str(server.get("run_id")), sum(int(stats[name]["calls"]) for name in _EMPTYING if name in stats)
        found = self._ask(lambda r: r.get(self._marker))
        if found is None:
            alone = self._epoch and lived == self._lived
            made = self._epoch if alone else secrets.token_hex(8)
            self._ask(lambda r: r.set(self._marker, made, nx=True))  # another engine may have been first
            found = self._ask(lambda r: r.get(self._marker)) or b""
        self._epoch, self._lived = found.decode("ascii", "replace"), lived
        return self._epoch

    # ------------------------------------------------------------ asking

    def _usable(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process must not use its parent's connections")
        if self._client is None:
            raise RuntimeError("the redis store is not open")
        return self._client

    def _nothing(self) -> int:
        self._usable()
        return 0

    def _ask(self, call: Callable[[Any], T]) -> T:
        """One request; once more when a kept connection turns out to be dead, since the server may be a new one.

        Raises:
            TimeoutError, ConnectionError, OSError: as the client found it, without its text (F94).
        """
        client, errors = self._usable(), self._redis.exceptions
        try:
            return call(client)
        except errors.TimeoutError as exc:
            plain(exc)
        except errors.AuthenticationError as exc:
            plain(exc)
        except errors.ConnectionError:
            client.connection_pool.disconnect(inuse_connections=False)
        except errors.RedisError as exc:
            plain(exc)
        try:
            return call(self._usable())
        except errors.RedisError as exc:
            plain(exc)

    def _pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Answers one by one; an error of one command is its answer."""
        if not commands:
            self._usable()
            return []

        def run(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(pipe.execute(raise_on_error=False))

        return self._ask(run)

    def _full(self, answer: Exception) -> bool:
        return isinstance(answer, self._redis.exceptions.OutOfMemoryError) or str(answer).startswith("OOM")

    def _ttl(self) -> tuple[str, ...]:
        return ("EX", str(self._options.ttl_s)) if self._options.ttl_s else ()

    def _parts(self, n: int) -> list[slice]:
        self._usable()
        return [slice(i, min(n, i + self._step)) for i in range(0, n, self._step)]

    def _name(self, key: str) -> str:
        return PREFIX + key


def _call(name: str, *args: Any, **fields: Any) -> Callable[[Any], Any]:
    """A method of the client with its arguments, to be called when there is a connection."""
    return lambda client: getattr(client, name)(*args, **fields)


def missing() -> list[str]:
    """The package, and its version."""
    if importlib.util.find_spec("redis") is None:
        return ["redis (extra 'redis')"]
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        found = importlib.metadata.version("redis")
        if int(found.partition(".")[0]) < MIN_VERSION:
            return [f"redis >= {MIN_VERSION} ({found} is installed)"]
    return []


SPEC = BackendSpec(
    manifest=lambda options, env: RedisStore.manifest,
    options=RedisOptions,
    create=RedisStore,
    missing=missing,
    layouts=RedisStore.manifest.layouts,
    notes=("one server, no cluster; its maxmemory and eviction policy bound what is kept",),
)
