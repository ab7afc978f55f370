"""Options of ``hf3fs``: the keys of SGLang's config file, with its meaning, and where else they may come from."""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

from hicache_hooks.backends.options import BackendOptions, StoreFacts, invalid, parse_size

CONFIG_ENV = "SGLANG_HICACHE_HF3FS_CONFIG_PATH"
MAX_CONFIG_BYTES = 1 << 20
MIN_SLOTS = 4  # the canary's pages must fit
MUCH_MEMORY = 1 << 30  # bytes of shared memory from which the answer says so
_FROM_FILE = ("file_path_prefix", "file_size", "numjobs", "entries", "client_timeout", "metadata_server_url")


_Jobs = Annotated[int, msgspec.Meta(ge=1, le=256)]
_Entries = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=600)]


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class Hf3fsOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``hf3fs``; what is not given here is taken from the JSON file that the variable names."""

    file_path_prefix: Annotated[
        str | None,
        _doc(f"path below a 3FS mount; each rank makes its own file from it; else the file of ${CONFIG_ENV}"),
    ] = None
    file_size: Annotated[
        int | str | None, _doc("required here or in that file: bytes of each rank's file, index included, or 1tb")
    ] = None
    numjobs: Annotated[_Jobs | None, _doc("clients: batches in flight at once; default 16")] = None
    entries: Annotated[_Entries | None, _doc("pages per ring submission; default 8")] = None
    client_timeout: Annotated[_Timeout | None, _doc("longest wait for one submission, s; default 5")] = None
    metadata_server_url: Annotated[
        str | None, _doc("default none, and else refused: the index lies in the file itself")
    ] = None

    def effective(self, env: Mapping[str, str]) -> Self:
        """Everything filled in, the size in bytes.

        Raises:
            InvalidConfig: no path or size anywhere, a file that is no JSON object, a metadata server.
        """
        found = self._from_file(env.get(CONFIG_ENV, ""))
        values = {name: getattr(self, name) if getattr(self, name) is not None else found.get(name)
                  for name in _FROM_FILE}  # fmt: skip
        try:
            merged = msgspec.convert({k: v for k, v in values.items() if v is not None}, type(self))
        except msgspec.ValidationError:
            raise invalid(
                "file_path_prefix", f"the file of {CONFIG_ENV} holds a value of a wrong type or range"
            ) from None
        if not merged.file_path_prefix:
            raise invalid("file_path_prefix", f"must be given (or {CONFIG_ENV} on the engine's host)", "missing_option")
        if not os.path.isabs(merged.file_path_prefix):
            raise invalid("file_path_prefix", "must be an absolute path")
        if merged.file_size is None:
            raise invalid("file_size", "must be given", "missing_option")
        if merged.metadata_server_url:
            raise invalid(
                "metadata_server_url", "is not used here: this client keeps its index in the file", "unsupported_option"
            )
        return msgspec.structs.replace(
            merged,
            file_path_prefix=os.path.normpath(merged.file_path_prefix),
            file_size=parse_size(merged.file_size, "file_size"),
            numjobs=16 if merged.numjobs is None else merged.numjobs,
            entries=8 if merged.entries is None else merged.entries,
            client_timeout=5.0 if merged.client_timeout is None else merged.client_timeout,
            metadata_server_url=None,
        )

    @staticmethod
    def _from_file(path: str) -> dict[str, Any]:
        """SGLang's config file; its owner is the engine's, who set the variable."""
        if not path:
            return {}
        try:
            with open(path, "rb") as file:
                document = json.loads(file.read(MAX_CONFIG_BYTES))
        except (OSError, ValueError):
            document = None
        if not isinstance(document, dict):
            raise invalid("file_path_prefix", f"the file of {CONFIG_ENV} cannot be read as a JSON object", "bad_file")
        return {name: document[name] for name in _FROM_FILE if name in document}

    def check(self, facts: StoreFacts) -> list[str]:
        """The file must hold a few pages (F49); memory and size are compared with the pool."""
        if facts.page_bytes < 1:
            raise invalid("page_bytes", "of this engine is below one", "bad_geometry")
        size = self.file_size if isinstance(self.file_size, int) else 0
        slots = slots_of(size, facts.page_bytes)
        if slots < MIN_SLOTS:
            raise invalid(
                "file_size", f"holds {slots} pages of {facts.page_bytes} bytes; needs {MIN_SLOTS}", "bad_geometry"
            )
        warnings = []
        if slots < facts.l2_pages:
            warnings.append(f"file_size holds {slots} pages, fewer than the host pool's {facts.l2_pages}")
        memory = 2 * (self.numjobs or 0) * (self.entries or 0) * facts.page_bytes
        if memory > MUCH_MEMORY:
            warnings.append(f"numjobs x entries takes {memory >> 20} MiB of shared memory on every rank")
        return warnings


BLOCK = 4096  # header, index and pages begin at multiples
ENTRY_BYTES = 64


def index_bytes(slots: int) -> int:
    """Length of the index of so many slots."""
    return -(-slots * ENTRY_BYTES // BLOCK) * BLOCK


def slots_of(file_size: int, page_bytes: int) -> int:
    """How many pages fit beside header and index."""
    room = file_size - BLOCK
    slots = max(0, room // (page_bytes + ENTRY_BYTES))
    while slots and index_bytes(slots) + slots * page_bytes > room:
        slots -= 1
    return slots
