"""FAKE of EIC's Python client: the names and shapes that its public callers use, over files. It is not EIC.

What the service really answers where callers look away is not known; the fake answers in the ways that callers allow
for. ``EIC_FAKE_ROOT`` is a directory that plays the service: one file per key below ``<namespace>``; it survives
clients and is shared by processes. ``faults.json`` in it, read at each call: ``{"down": true}`` (every key fails),
``{"fail_every": 3}``, ``{"no_codes": true}`` (a failed batch without per-key codes), ``{"register": false}``,
``{"init": 7}``, ``{"finds_all": true}``, ``{"all_missing": "FAILED"}`` (the batch status when no key is there).

It is stricter than a real client may be: memory said to be registered must be, and options must have the right types.
"""

import ctypes
import enum
import hashlib
import json
import os
import threading
from typing import Any


class StatusCode(enum.Enum):
    SUCCESS = 0
    PARTIAL_FAILED = 1
    FAILED = 2
    KEY_ABSENT = 17
    RPC_FAILED = 23


class LogLevel(enum.IntEnum):
    DEBUG, INFO, WARN, ERROR = range(4)


class TransportType(enum.IntEnum):
    TCP, RDMA, GDR, AUTO = range(4)


class MemoryType(enum.Enum):
    MEMORY_DEFAULT = 0
    MEMORY_CUDA = 1


class InitOption:
    log_dir: str = ""
    log_level = LogLevel.INFO
    transport_type = TransportType.TCP
    flag_file: str = ""
    multi_net_local_interface_names: str = ""


class _Named:
    ns: str = ""


class SetOption(_Named):
    ttl_second: int = -1


class GetOption(_Named):
    pass


class ExistOption(_Named):
    pass


class DelOption(_Named):
    pass


class MemoryInfo:
    type = MemoryType.MEMORY_DEFAULT
    cuda_id: int = 0


class StringVector(list):  # type: ignore[type-arg]
    def append(self, item: str) -> None:
        if not isinstance(item, str):
            raise TypeError("a StringVector holds strings")
        super().append(item)


class IOBuffers(list):  # type: ignore[type-arg]
    def append(self, address: int, nbytes: int, registered: bool) -> None:  # type: ignore[override]
        if address <= 0 or nbytes <= 0:
            raise ValueError("no memory")
        super().append((address, nbytes, registered))


class Outcome:
    def __init__(self, codes: list[StatusCode]) -> None:
        self.status_codes = codes


class Client:
    """One client."""

    def __init__(self) -> None:
        self._root = ""
        self._registered: list[tuple[int, int]] = []
        self._count = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def init(self, instance_id: str, endpoint: str, option: InitOption) -> int:
        if not isinstance(option.log_level, LogLevel) or not isinstance(option.transport_type, TransportType):
            raise TypeError("enums are needed")
        self._root = os.environ["EIC_FAKE_ROOT"]
        if ":" not in endpoint or not instance_id:
            return 22
        return int(self._faults().get("init", 0))

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        if info.type is MemoryType.MEMORY_CUDA:
            raise ValueError("host memory is not CUDA's")
        if self._faults().get("register") is False:
            return False
        self._registered += [(address, address + nbytes) for address, nbytes, _ in buffers]
        return True

    def mset(self, keys: StringVector, values: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        if not isinstance(option.ttl_second, int):
            raise TypeError("ttl_second")
        return self._each(keys, lambda i, path: self._store(path, values[i]), option)

    def mget(self, keys: StringVector, option: GetOption, values: IOBuffers) -> tuple[StatusCode, IOBuffers, Outcome]:
        status, outcome = self._each(keys, lambda i, path: self._fetch(path, values[i]), option)
        return status, values, outcome

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        finds_all = self._faults().get("finds_all")
        return self._each(
            keys, lambda i, path: StatusCode.SUCCESS if finds_all or os.path.exists(path) else StatusCode.KEY_ABSENT,
            option,
        )  # fmt: skip

    def mdel(self, keys: StringVector, option: DelOption) -> tuple[StatusCode, Outcome]:
        def remove(_: int, path: str) -> StatusCode:
            if os.path.exists(path):
                os.unlink(path)
            return StatusCode.SUCCESS

        return self._each(keys, remove, option)

    # ---- inner

    def _faults(self) -> dict[str, Any]:
        if os.getpid() != self._pid:
            raise RuntimeError("a forked client")
        try:
            with open(f"{self._root}/faults.json") as file:
                return dict(json.load(file))
        except FileNotFoundError:
            return {}

    def _each(self, keys: StringVector, one: Any, option: Any = None) -> tuple[StatusCode, Outcome]:
        if not self._root:
            return StatusCode.FAILED, Outcome([])
        faults = self._faults()
        space = "ns-" + getattr(option, "ns", "")
        os.makedirs(f"{self._root}/{space}", exist_ok=True)
        codes = []
        for i, key in enumerate(keys):
            with self._lock:
                self._count += 1
                fails = faults.get("down") or self._count % int(faults.get("fail_every", 1 << 60)) == 0
            name = hashlib.sha256(key.encode()).hexdigest()
            codes.append(StatusCode.RPC_FAILED if fails else one(i, f"{self._root}/{space}/{name}"))
        good = codes.count(StatusCode.SUCCESS)
        if good == len(codes):
            return StatusCode.SUCCESS, Outcome(codes)
        if not good and set(codes) == {StatusCode.KEY_ABSENT}:
            return StatusCode[faults.get("all_missing", "PARTIAL_FAILED")], Outcome(codes)
        if not good:
            return StatusCode.FAILED, Outcome([] if faults.get("no_codes") else codes)
        return StatusCode.PARTIAL_FAILED, Outcome(codes)

    def _memory(self, part: tuple[int, int, bool]) -> Any:
        address, nbytes, registered = part
        if registered and not any(a <= address and address + nbytes <= b for a, b in self._registered):
            raise ValueError("this memory was never registered")
        return (ctypes.c_char * nbytes).from_address(address)

    def _store(self, path: str, part: tuple[int, int, bool]) -> StatusCode:
        temp = f"{path}.{os.getpid()}.{threading.get_ident()}"
        with open(temp, "wb") as file:
            file.write(self._memory(part))
        os.rename(temp, path)
        return StatusCode.SUCCESS

    def _fetch(self, path: str, part: tuple[int, int, bool]) -> StatusCode:
        try:
            with open(path, "rb") as file:
                file.readinto(self._memory(part))  # a shorter object leaves a stale tail, as several real clients do
        except FileNotFoundError:
            return StatusCode.KEY_ABSENT
        return StatusCode.SUCCESS
