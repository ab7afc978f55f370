"""``nixl`` on objects (plugin OBJ, S3): one object per page.

Bytes travel through bounce buffers of ours: the S3 client inside the plugin cannot be interrupted (a dead server
costs it 25 s, a hung one 58 s), and a page of the pool must not be touched after its call has returned. So a call ends
at its deadline, and the buffers of a late transfer come back when it ends. Reads and writes have buffers and agents
(so S3 clients with their threads) of their own: a full server holds writes, and what it has must still be read (F62).

An object that is shorter than its page reads as DONE with the tail of the buffer as it was: the tail is marked before
each read, and a mark that is still there is a miss.

``exists`` asks the server only for pages that this process has neither stored nor seen (``known.py``).
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from hicache_hooks.backends.base import Got, StoreContext
from hicache_hooks.backends.file_paths import safe
from hicache_hooks.backends.known import Known
from hicache_hooks.backends.nixl_agent import Late, TransferFailed, Transfers
from hicache_hooks.backends.nixl_options import NixlOptions
from hicache_hooks.backends.s3_client import S3Client, S3Target
from hicache_hooks.backends.upkeep import part_or_raise, stored_or_raise

BOUNCE_PAGES = 64
BOUNCE_BYTES = 64 << 20  # most for each side; one page at least
LOOK_S = 0.05  # between two looks at late transfers, while a call waits for their buffers
MARK_BYTES = 8
_late: list[Late] = []  # of closed stores: nothing of them may be freed while they run
_late_lock = threading.Lock()


class NixlObjects:
    """The store behind ``nixl.NixlStore``; ``transfers`` belongs to it."""

    def __init__(
        self,
        options: NixlOptions,
        context: StoreContext,
        transfers: Transfers,
        secrets: Mapping[str, str],
        writers: Transfers | None = None,
    ) -> None:
        """No I/O. ``secrets``: access_key, secret_key, session_token. ``writers``: for puts; None: the same."""
        self._target = S3Target(
            bucket=options.bucket or "",
            endpoint=options.endpoint_override or "",
            scheme=options.scheme or "http",
            region=options.region or "us-east-1",
            access_key=secrets.get("access_key", ""),
            secret_key=secrets.get("secret_key", ""),
            session_token=secrets.get("session_token", ""),
            virtual_host=bool(options.use_virtual_addressing),
            ca_bundle=options.ca_bundle or "",
        )
        self._timeout_s = options.timeout_s
        self._prefix = f"{safe(context.namespace)}/"
        self._namespace = context.namespace
        self._page_bytes = context.page_bytes
        self._readers, self._writers = transfers, writers or transfers
        self._client: S3Client | None = None
        pages = max(1, min(BOUNCE_PAGES, BOUNCE_BYTES // max(1, context.page_bytes)))
        self._reads, self._writes = _Bounce(pages, self._page_bytes), _Bounce(pages, self._page_bytes)
        self._known = Known(enabled=True)
        self._devices = count(1)  # unique among the keys that are registered at a time

    def open(self) -> None:
        """Look at the bucket, then allocate and register the bounce buffers.

        Raises:
            OSError: the server cannot be reached, or refuses us.
        """
        self._client = S3Client(self._target, self._timeout_s)
        self._client.check_bucket()
        self._readers.register(self._reads.memory)
        self._writers.register(self._writes.memory)
        _reap()

    def close(self) -> None:
        """Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        with _late_lock:
            _late.extend((*self._reads.abandon(), *self._writes.abandon()))
        _reap()

    # ------------------------------------------------------------ traffic

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        """See ``Backend.batch_put``. An object that exists is written again: an S3 PUT is atomic."""
        self._require_server()
        done: list[bool | None] = []
        for part in self._parts(len(keys)):
            try:
                with self._forgets_failed():
                    done += self._put(keys[part], pages[part])
            except OSError as exc:
                return stored_or_raise(done, len(keys), exc)
        return done

    def _put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool | None]:
        since = self._known.now
        with self._writes.take(len(keys), self._timeout_s) as slots:
            for slot, page in zip(slots.pages, pages, strict=True):
                slot[:] = page
            done = self._run("WRITE", keys, slots)
        if not any(done):
            raise TransferFailed("nixl: no object was taken")
        self._known.add((key for key, yes in zip(keys, done, strict=True) if yes), since)
        return [yes or None for yes in done]  # the plugin does not say why one was not

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        """See ``Backend.batch_get``."""
        self._require_server()
        out: list[Got] = []
        for part in self._parts(len(keys)):
            try:
                with self._forgets_failed():
                    out += self._get(keys[part], pages[part])
            except OSError as exc:
                return part_or_raise(out, len(keys), exc)
        return out

    def _get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[Got]:
        since = self._known.now
        with self._reads.take(len(keys), self._timeout_s) as slots:
            mark = slots.mark()
            moved = self._run("READ", keys, slots)
            results = [Got.HIT if yes else Got.ERROR for yes in moved]
            for i, (slot, page) in enumerate(zip(slots.pages, pages, strict=True)):
                if moved[i] and slot[-MARK_BYTES:] == mark:
                    results[i] = Got.MISS
                elif moved[i]:
                    page[:] = slot
        self._known.add((key for key, got in zip(keys, results, strict=True) if got is Got.HIT), since)
        self._known.drop(key for key, got in zip(keys, results, strict=True) if got is not Got.HIT)
        failed = [i for i, yes in enumerate(moved) if not yes]
        if failed:  # the plugin does not say why; a missing object is no error
            try:
                lengths = self._s3().lengths([self._name(keys[i]) for i in failed])
            except OSError as exc:
                return part_or_raise(results, len(keys), exc)
            for i, length in zip(failed, lengths, strict=True):
                results[i] = Got.ERROR if length == self._page_bytes else Got.MISS
        return results

    def _run(self, op: str, keys: Sequence[str], slots: "_Slots") -> list[bool]:
        targets = [(next(self._devices), self._name(key)) for key in keys]
        transfers = self._writers if op == "WRITE" else self._readers
        try:
            return transfers.run_each(op, slots.pages, targets, self._timeout_s, keep=slots.bounce)
        except Late as late:
            slots.late = late  # these buffers come back when it ends
            raise

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See ``Backend.batch_exists``."""
        self._s3()
        found = self._known.has(keys)
        asked = [key for key, known in zip(keys, found, strict=True) if not known]
        answers = iter(self.confirm(asked) if asked else ())
        return [known or next(answers) for known in found]

    def confirm(self, keys: Sequence[str]) -> list[bool]:
        """By length: query_memory would count short objects, and blocks for 25 s without a server."""
        since = self._known.now
        with self._forgets_failed():
            lengths = self._s3().lengths([self._name(key) for key in keys])
        found = [length == self._page_bytes for length in lengths]
        self._known.add((key for key, there in zip(keys, found, strict=True) if there), since)
        self._known.drop(key for key, there in zip(keys, found, strict=True) if not there)
        return found

    def forget(self) -> None:
        """Have the server asked for every page again."""
        self._known.clear()

    @contextmanager
    def _forgets_failed(self) -> Iterator[None]:
        """A server that failed may come back without its pages; and while it is dead no page may be promised."""
        try:
            yield
        except OSError:
            self.forget()
            raise

    # ------------------------------------------------------------ upkeep

    def delete(self, keys: Sequence[str]) -> int:
        """See ``Backend.delete``."""
        names = [self._name(key) for key in keys]
        with self._known.removing(keys):
            there = [name for name, length in zip(names, self._s3().lengths(names), strict=True) if length >= 0]
            self._s3().delete(there)
        return len(there)

    def set_aside(self, key: str) -> None:
        """Delete it: a copy for a look would cost a round trip of its bytes."""
        with self._known.removing([key]):
            self._s3().delete([self._name(key)])

    def clear(self) -> int:
        """See ``Backend.clear``."""
        gone = 0
        batch: list[str] = []
        try:
            for name in self._s3().below(self._prefix):
                batch.append(name)
                if len(batch) == BOUNCE_PAGES:
                    self._s3().delete(batch)
                    gone, batch = gone + len(batch), []
            self._s3().delete(batch)
        finally:
            self.forget()  # also what was stored meanwhile, before or after its turn
        return gone + len(batch)

    def health(self) -> dict[str, Any]:
        """Asks the bucket. Raises OSError when it does not answer."""
        self._s3().check_bucket()
        return {
            "bucket": self._target.bucket,
            "endpoint": self._target.host(),
            "late_transfers": self._reads.late_count() + self._writes.late_count(),
            "direct_io": False,
            "direct_io_reason": "objects have none",
        }

    # ------------------------------------------------------------ places

    def _s3(self) -> S3Client:
        if self._client is None:
            raise RuntimeError("the NIXL store is not open")
        return self._client

    def _name(self, key: str) -> str:
        return self._prefix + safe(key.removeprefix(f"{self._namespace}."))

    def _parts(self, n: int) -> list[slice]:
        step = self._reads.count
        return [slice(i, min(n, i + step)) for i in range(0, n, step)]

    def _require_server(self) -> None:
        """A refused connection is said in a moment; the plugin would take 25 s to say it."""
        self._s3()
        where = urlsplit(f"//{self._target.host()}")
        port = where.port or (443 if self._target.tls() else 80)
        with self._forgets_failed():
            socket.create_connection((where.hostname or "", port), self._timeout_s).close()


class _Bounce:
    """Page buffers that transfers use, handed out for one call at a time."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count = count
        self._page_bytes = page_bytes
        self._memory: memoryview | None = None
        self._free = list(range(count))
        self._late: list[tuple[Late, list[int]]] = []
        self._changed = threading.Condition()

    @property
    def memory(self) -> memoryview:
        """Allocated at first use."""
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, self.count * self._page_bytes))
        return self._memory

    def take(self, n: int, timeout_s: float) -> "_Slots":
        """``n`` buffers at once.

        Raises:
            TimeoutError: they did not come free: late transfers hold them, or many threads.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._recover()
            while len(self._free) < n:
                if time.monotonic() > until:
                    raise TimeoutError("no transfer buffers came free")
                self._changed.wait(LOOK_S)
                self._recover()
            numbers = [self._free.pop() for _ in range(n)]
        step = self._page_bytes
        return _Slots(self, numbers, [self.memory[i * step : (i + 1) * step] for i in numbers])

    def give(self, numbers: list[int], late: Late | None) -> None:
        with self._changed:
            if late is None:
                self._free += numbers
                self._changed.notify_all()
            else:
                self._late.append((late, numbers))

    def _recover(self) -> None:
        still = []
        for late, numbers in self._late:
            if late.ended():
                self._free += numbers
            else:
                still.append((late, numbers))
        self._late = still

    def late_count(self) -> int:
        with self._changed:
            self._recover()
            return len(self._late)

    def abandon(self) -> list[Late]:
        """The transfers that still run; their buffers live as long as they."""
        with self._changed:
            found, self._late = [late for late, _ in self._late], []
            return found


class _Slots:
    """Buffers of one call; given back at its end, or when its late transfer ends."""

    def __init__(self, bounce: _Bounce, numbers: list[int], pages: list[memoryview]) -> None:
        self.pages = pages
        self.late: Late | None = None
        self.bounce = bounce
        self._numbers = numbers

    def mark(self) -> bytes:
        """Mark every tail with noise, which no object ends in; returns it."""
        noise = os.urandom(MARK_BYTES)
        for page in self.pages:
            page[-MARK_BYTES:] = noise
        return noise

    def __enter__(self) -> "_Slots":
        return self

    def __exit__(self, *_: object) -> None:
        self.bounce.give(self._numbers, self.late)


def _reap() -> None:
    with _late_lock:
        _late[:] = [late for late in _late if not late.ended()]
