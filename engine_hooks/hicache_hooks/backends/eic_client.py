"""The seam to EIC's Python client (module ``eic``): its call surface as its public callers use it, results per key.

The client is closed source and no package index has it; what is known is how SGLang and AIBrix call it. Where they
disagree or stay silent we learn from the service itself:

1. *Absent* has no documented code. ``open`` asks for a random key, once by exists and once by get, and remembers the
   answer's code: that one is a miss, any other code but SUCCESS an error.
2. A batch's status may be SUCCESS, PARTIAL_FAILED or another code; per-key codes are believed when there are as many as
   keys, whatever the status. Too few, and the whole batch failed.
3. ``register_memory`` answers True, or nothing that a caller looks at: only False is taken as a refusal.
4. There is no call to list keys, to unregister memory or to close. Dropping the client is its end.
"""

import importlib
import os
import secrets
from collections.abc import Sequence
from typing import Any

from hicache_hooks.backends.eic_options import EicConfig, EicOptions, endpoint_of

PACKAGE = "eic (the client of Volcano Engine's Elastic Instant Cache; it comes with their images)"
_PROBE_BYTES = 4096


class EicFailed(OSError):
    """A call failed as a whole; the text is ours and the client's code, no content."""


def load() -> Any:
    """The module. Raises ImportError where it is not installed, or is another package of that name."""
    module = importlib.import_module("eic")
    if not hasattr(module, "Client"):
        raise ImportError("the installed module eic is another one", name="eic")
    return module


def missing() -> list[str]:
    """What this host lacks."""
    try:
        load()
    except ImportError:
        return [PACKAGE]
    return []


class EicClient:
    """One connection. Callers see to it that nobody calls after ``drop``."""

    def __init__(self, options: EicOptions) -> None:
        """``options`` are effective ones. No I/O."""
        if not isinstance(options.config, EicConfig):
            raise TypeError("the options are not effective")
        self._config, self._ns, self._ttl = options.config, options.namespace or "", options.ttl_second
        self._eic: Any = None
        self._client: Any = None
        self._absent: set[Any] = set()

    def open(self) -> None:
        """Connect, and learn how absence looks.

        Raises:
            EicFailed: the client could not be initialised. ImportError: no client here. OSError: the log directory.
        """
        eic, config = load(), self._config
        option = eic.InitOption()
        if config.eic_log_dir:
            os.makedirs(config.eic_log_dir, mode=0o755, exist_ok=True)
            option.log_dir = config.eic_log_dir
        option.log_level = eic.LogLevel(config.eic_log_level)
        option.transport_type = eic.TransportType(config.eic_trans_type)
        if config.eic_flag_file:
            option.flag_file = config.eic_flag_file
        client = eic.Client()
        code = client.init(config.eic_instance_id, endpoint_of(config), option)
        if code != 0:
            raise EicFailed(f"the EIC client could not be initialised: code {code}")
        self._eic, self._client = eic, client
        self._learn()

    def _learn(self) -> None:
        from hicache_hooks.backends.native import address_of

        nobody = f"hicache-absent-{secrets.token_hex(16)}"
        scratch = memoryview(bytearray(_PROBE_BYTES))
        success = self._eic.StatusCode.SUCCESS
        for codes in (
            self._codes("mexist", self._mexist([nobody]), 1),
            self._codes("mget", self._mget([nobody], [(address_of(scratch), _PROBE_BYTES, False)]), 1),
        ):
            if codes[0] == success:
                raise EicFailed("the service finds a key that nobody stored")
            self._absent.add(codes[0])

    def register(self, address: int, nbytes: int) -> None:
        """Host memory. Raises EicFailed."""
        info = self._eic.MemoryInfo()
        info.type = self._eic.MemoryType.MEMORY_DEFAULT
        buffers = self._eic.IOBuffers()
        buffers.append(address, nbytes, True)
        if self._client.register_memory(buffers, info) is False:
            raise EicFailed("the EIC client refused to register the host pool")

    @property
    def direct(self) -> tuple[bool, bool]:
        """(put, get): whether registered memory is to be said to be so."""
        return self._config.enable_kvset_direct, self._config.enable_kvget_direct

    # ---- batches; parts are (address, bytes, registered)

    def put(self, keys: Sequence[str], parts: Sequence[tuple[int, int, bool]]) -> list[bool | None]:
        """True: stored; None: an error. Which code would mean "no room" is in no public source."""
        option = self._eic.SetOption()
        option.ns, option.ttl_second = self._ns, self._ttl
        result = self._client.mset(self._strings(keys), self._buffers(parts), option)
        codes = self._codes("mset", result, len(keys))
        return [code == self._eic.StatusCode.SUCCESS or None for code in codes]

    def get(self, keys: Sequence[str], parts: Sequence[tuple[int, int, bool]]) -> list[bool | None]:
        """True: read; False: not there; None: an error."""
        return [self._found(code) for code in self._codes("mget", self._mget(keys, parts), len(keys))]

    def exists(self, keys: Sequence[str]) -> list[bool | None]:
        """As ``get``."""
        return [self._found(code) for code in self._codes("mexist", self._mexist(keys), len(keys))]

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are no error."""
        option = self._eic.DelOption()
        if hasattr(option, "ns"):  # no public caller sets it
            option.ns = self._ns
        self._client.mdel(self._strings(keys), option)

    def drop(self) -> None:
        """The end."""
        self._client = None

    # ---- inner

    def _mexist(self, keys: Sequence[str]) -> Any:
        option = self._eic.ExistOption()
        option.ns = self._ns
        return self._client.mexist(self._strings(keys), option)

    def _mget(self, keys: Sequence[str], parts: Sequence[tuple[int, int, bool]]) -> Any:
        option = self._eic.GetOption()
        option.ns = self._ns
        status, _, outcome = self._client.mget(self._strings(keys), option, self._buffers(parts))
        return status, outcome

    def _codes(self, call: str, result: Any, keys: int) -> list[Any]:
        status, outcome = result
        codes = list(getattr(outcome, "status_codes", None) or ())
        if len(codes) == keys:
            return codes
        if status == self._eic.StatusCode.SUCCESS and not codes:
            return [status] * keys
        raise EicFailed(f"{call} failed: status {status}, {len(codes)} codes for {keys} keys")

    def _found(self, code: Any) -> bool | None:
        if code == self._eic.StatusCode.SUCCESS:
            return True
        return False if code in self._absent else None

    def _strings(self, keys: Sequence[str]) -> Any:
        strings = self._eic.StringVector()
        for key in keys:
            strings.append(key)
        return strings

    def _buffers(self, parts: Sequence[tuple[int, int, bool]]) -> Any:
        buffers = self._eic.IOBuffers()
        for address, nbytes, registered in parts:
            buffers.append(address, nbytes, registered)
        return buffers
