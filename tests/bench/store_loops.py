"""Each store's own client in the plainest loop that its documentation shows: what ours is measured against.

A loop gets the memory of all pages, registers it if the client wants that, and moves all pages in one ``put`` and one
``get``. No checks, no results per key, no deadlines: that is what a backend adds.
"""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Pages = list[memoryview]


class Loop(Protocol):
    """One client of one store."""

    def put(self, keys: list[str], pages: Pages) -> None: ...
    def get(self, keys: list[str], pages: Pages) -> None: ...
    def forget(self, keys: list[str]) -> None: ...  # not timed: makes room for the next round


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class FileLoop:
    """pwrite and preadv."""

    def __init__(self, config: dict[str, Any], memory: memoryview, root: Path) -> None:
        self.root = root

    def put(self, keys: list[str], pages: Pages) -> None:
        for key, page in zip(keys, pages, strict=True):
            fd = os.open(self.root / key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
            os.pwrite(fd, page, 0)
            os.close(fd)

    def get(self, keys: list[str], pages: Pages) -> None:
        for key, page in zip(keys, pages, strict=True):
            fd = os.open(self.root / key, os.O_RDONLY)
            if os.preadv(fd, [page], 0) != page.nbytes:
                raise OSError("short read")
            os.close(fd)

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            os.unlink(self.root / key)


class NixlLoop:
    """One transfer of all pages, as notes of NIXL's examples do it."""

    def __init__(self, config: dict[str, Any], memory: memoryview, root: Path) -> None:
        from hicache_hooks.backends import nixl_probe

        api = nixl_probe.load()
        self.root = root
        obj = config.get("plugin", {}).get("obj")
        self.plugin, self.segment = ("OBJ", "OBJ") if obj else ("POSIX", "FILE")
        parameters = {k: str(v).lower() if isinstance(v, bool) else v for k, v in (obj or {}).items() if k != "active"}
        parameters |= {key: "true" for key in config if key.startswith("use_") and key != "use_direct_io"}
        self.direct = 0 if obj or not config.get("use_direct_io", True) else os.O_DIRECT
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self.agent = api.nixl_agent("loop", api.nixl_agent_config(backends=[], sync_mode=sync))
        self.agent.create_backend(self.plugin, parameters)
        self.agent.register_memory(self.agent.get_reg_descs([(address(memory), memory.nbytes, 0, "")], "DRAM"))

    def put(self, keys: list[str], pages: Pages) -> None:
        self._move("WRITE", keys, pages)

    def get(self, keys: list[str], pages: Pages) -> None:
        self._move("READ", keys, pages)

    def forget(self, keys: list[str]) -> None:
        if self.segment == "FILE":
            for key in keys:
                os.unlink(self.root / key)

    def _move(self, op: str, keys: list[str], pages: Pages) -> None:
        agent, size = self.agent, pages[0].nbytes
        fds: list[int] = []
        if self.segment == "FILE":
            fds = [os.open(self.root / key, os.O_RDWR | os.O_CREAT | self.direct, 0o640) for key in keys]
            rows = [(0, size, fd, "") for fd in fds]
        else:
            rows = [(0, size, i, f"loop/{key}") for i, key in enumerate(keys)]
        registered = agent.register_memory(agent.get_reg_descs(rows, self.segment))
        handle = agent.initialize_xfer(
            op, agent.get_xfer_descs([(address(page), size, 0) for page in pages], "DRAM"),
            agent.get_xfer_descs([row[:3] for row in rows], self.segment), "loop",
        )  # fmt: skip
        state = agent.transfer(handle)
        while state != "DONE":
            time.sleep(0.0001)  # as SGLang's loop
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)
        for fd in fds:
            os.close(fd)


class RedisLoop:
    """Pipelined SET, MGET in parts of 16 pages, copied into the pages."""

    def __init__(self, config: dict[str, Any], memory: memoryview, root: Path) -> None:
        import redis

        self.client = redis.Redis.from_url(config["url"], password=Path(config["password_file"]).read_text().strip())

    def put(self, keys: list[str], pages: Pages) -> None:
        for i in range(0, len(keys), 16):
            pipe = self.client.pipeline(transaction=False)
            for key, page in zip(keys[i : i + 16], pages[i : i + 16], strict=True):
                pipe.execute_command("SET", f"loop:{key}", page)
            pipe.execute()

    def get(self, keys: list[str], pages: Pages) -> None:
        for i in range(0, len(keys), 16):
            found: Any = self.client.mget([f"loop:{key}" for key in keys[i : i + 16]])
            for page, value in zip(pages[i : i + 16], found, strict=True):
                page[:] = value

    def forget(self, keys: list[str]) -> None:
        self.client.delete(*(f"loop:{key}" for key in keys))


class MooncakeLoop:
    """batch_put_from and batch_get_into of 32 pages each."""

    def __init__(self, config: dict[str, Any], memory: memoryview, root: Path) -> None:
        from tests.rigs.stores.mooncake_tool import client

        self.client = client(config["master_server_address"], 2 << 30 if config["global_segment_size"] else 0)
        if self.client.register_buffer(address(memory), memory.nbytes):
            raise OSError("register_buffer")

    def put(self, keys: list[str], pages: Pages) -> None:
        self._move(self.client.batch_put_from, keys, pages, 0)

    def get(self, keys: list[str], pages: Pages) -> None:
        self._move(self.client.batch_get_into, keys, pages, pages[0].nbytes)

    def forget(self, keys: list[str]) -> None:
        self.client.batch_remove([f"loop{key}" for key in keys], True)

    def _move(self, call: Callable[..., list[int]], keys: list[str], pages: Pages, right: int) -> None:
        for i in range(0, len(keys), 32):
            part = pages[i : i + 32]
            done = call([f"loop{k}" for k in keys[i : i + 32]], [address(p) for p in part], [p.nbytes for p in part])
            if done != [right] * len(part):
                raise OSError(f"codes {sorted(set(done))}")


class AibrixLoop:
    """allocate_for, copy, put; acquire, copy: chains of 32 blocks, as SGLang's adapter does it."""

    def __init__(self, config: dict[str, Any], memory: memoryview, root: Path) -> None:
        import torch

        from hicache_hooks.backends import aibrix_manager
        from hicache_hooks.backends.aibrix_options import BLOCK_TOKENS, AibrixOptions

        self.torch, self.tokens = torch, BLOCK_TOKENS
        options = AibrixOptions(**config).effective(os.environ)
        ours = {"rocksdb_root": str(root / "rocks")} if options.l2_backend == "ROCKSDB" else {}
        self.make = lambda nbytes: aibrix_manager.make(
            nbytes, options.settings(**ours), int((options.l1_capacity_gb or 0) * (1 << 30))
        )  # fmt: skip
        self.manager: Any = None
        self.hashes: Any = aibrix_manager.load().BlockHashes

    def put(self, keys: list[str], pages: Pages) -> None:
        if self.manager is None:
            self.manager = self.make(pages[0].nbytes)
        for i in range(0, len(keys), 32):
            hashes = self.hashes(keys[i : i + 32], self.tokens)
            handle = self.manager.allocate_for(None, hashes).value
            for tensor, page in zip(handle.to_tensors(), pages[i : i + 32], strict=True):
                tensor.view(self.torch.uint8).reshape(-1).copy_(self.torch.frombuffer(page, dtype=self.torch.uint8))
            if self.manager.put(None, hashes, handle).value != self.tokens * len(pages[i : i + 32]):
                raise OSError("not all was stored")

    def get(self, keys: list[str], pages: Pages) -> None:
        for i in range(0, len(keys), 32):
            hashes = self.hashes(keys[i : i + 32], self.tokens)
            _, handle = self.manager.acquire(None, hashes).value
            for tensor, page in zip(handle.to_tensors(), pages[i : i + 32], strict=True):
                self.torch.frombuffer(page, dtype=self.torch.uint8).copy_(tensor.view(self.torch.uint8).reshape(-1))
            handle.release()

    def forget(self, keys: list[str]) -> None:
        for i in range(0, len(keys), 32):
            self.manager.delete(None, self.hashes(keys[i : i + 32], self.tokens))


LOOPS: dict[str, Callable[[dict[str, Any], memoryview, Path], Loop]] = {
    "file": FileLoop, "nixl": NixlLoop, "redis": RedisLoop, "mooncake": MooncakeLoop, "aibrix": AibrixLoop,
}  # fmt: skip
