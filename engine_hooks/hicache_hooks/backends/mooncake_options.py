"""Options of ``mooncake``: SGLang's names, their variables after them, and the checks that need no store.

Order for each value: the option, the file named by ``SGLANG_HICACHE_MOONCAKE_CONFIG_PATH``, the variable, the default.
"""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

from hicache_hooks.backends.options import BackendOptions, StoreFacts, invalid, parse_size

CONFIG_ENV = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
MAX_CONFIG_BYTES = 1 << 20
MIN_SEGMENT = 1 << 20  # the allocator's granularity is below this; 0 means: contribute none
P2P = "P2PHANDSHAKE"
RDMA_DEVICES = "/sys/class/infiniband"

# Option -> (environment variables in order, default). SGLang's own (environ.py).
_FALLBACKS: dict[str, tuple[tuple[str, ...], Any]] = {
    "master_server_address": (("MOONCAKE_MASTER",), None),
    "client_server_address": (("MOONCAKE_CLIENT",), None),
    "local_hostname": (("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"), "localhost"),
    "metadata_server": (("MOONCAKE_TE_META_DATA_SERVER",), P2P),
    "global_segment_size": (("MOONCAKE_GLOBAL_SEGMENT_SIZE",), "4gb"),
    "local_buffer_size": (("MOONCAKE_LOCAL_BUFFER_SIZE",), 16 << 20),
    "protocol": (("MOONCAKE_PROTOCOL",), "rdma"),
    "device_name": (("MOONCAKE_DEVICE",), ""),
    "master_metrics_port": (("MOONCAKE_MASTER_METRICS_PORT",), 9003),
    "check_server": (("MOONCAKE_CHECK_SERVER",), False),
    "standalone_storage": (("MOONCAKE_STANDALONE_STORAGE",), False),
    "enable_ssd_offload": (("MOONCAKE_ENABLE_SSD_OFFLOAD",), False),
    "ssd_offload_path": (("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",), None),
    "tenant_id": (("MOONCAKE_TENANT_ID",), "default"),
}
_BOOLS = {"1": True, "true": True, "yes": True, "y": True, "0": False, "false": False, "no": False, "n": False}


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class MooncakeOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``mooncake``; null: the variable in brackets, else the default."""

    master_server_address: Annotated[
        str | None, _doc("host:port of mooncake_master, else [MOONCAKE_MASTER]; required")
    ] = None
    local_hostname: Annotated[
        str | None, _doc("this host's name for its peers; default localhost [MOONCAKE_LOCAL_HOSTNAME, LOCAL_HOSTNAME]")
    ] = None
    metadata_server: Annotated[
        str | None, _doc("P2PHANDSHAKE (default) or http://host:port/metadata [MOONCAKE_TE_META_DATA_SERVER]")
    ] = None
    global_segment_size: Annotated[
        int | str | None,
        _doc('memory that the engine contributes, bytes or "4gb"; shared by its tp x pp ranks; default 4gb; 0: none'),
    ] = None
    local_buffer_size: Annotated[int | str | None, _doc("the client's own buffer; default 16mb")] = None
    protocol: Annotated[str | None, _doc("rdma (default), tcp, efa, ... [MOONCAKE_PROTOCOL]")] = None
    device_name: Annotated[
        str | None,
        _doc(
            'RDMA devices with commas, or {"tp rank": "devices"} as JSON; default Mooncake\'s choice [MOONCAKE_DEVICE]'
        ),
    ] = None
    master_metrics_port: Annotated[int | None, _doc("HTTP port of the master, for check_server; default 9003")] = None
    check_server: Annotated[bool | None, _doc("refuse unless some storage node has mounted memory; default false")] = (
        None
    )
    tenant_id: Annotated[str | None, _doc("tenant; default 'default' [MOONCAKE_TENANT_ID]")] = None
    enable_ssd_offload: Annotated[bool | None, _doc("let Mooncake spill to SSD; default false")] = None
    ssd_offload_path: Annotated[
        str | None, _doc("where it spills, each rank below in a directory of its own; default none")
    ] = None
    extra_backend_tag: Annotated[
        str | None, _doc("prefix of every key; isolates deployments in one store; default none")
    ] = None
    enable_group_semantics: Annotated[bool, _doc("accepted; a page is one object here, so there is no group")] = False
    standalone_storage: Annotated[
        bool | None, _doc("default false; true is refused: it needs Mooncake's own host allocator")
    ] = None
    client_server_address: Annotated[str | None, _doc("default none; not supported, see standalone_storage")] = None
    rpc_timeout_ms: Annotated[
        int, _doc("of a call to the master; counts from the first use of mooncake in a process on", ge=100, le=60_000)
    ] = 2000

    def effective(self, env: Mapping[str, str]) -> Self:
        """Every value resolved, sizes in bytes."""
        file = _config_file(env)
        values = {name: _value(self, name, file, env) for name in _FALLBACKS}
        for name in ("global_segment_size", "local_buffer_size"):
            values[name] = parse_size(values[name], name)
        made = msgspec.structs.replace(self, **values)
        if made.standalone_storage or (made.client_server_address and not made.master_server_address):
            raise invalid(
                "standalone_storage", "needs host memory from Mooncake's own allocator; use master_server_address",
                "unsupported_option",
            )  # fmt: skip
        if not made.master_server_address:
            raise invalid("master_server_address", "must be given (or MOONCAKE_MASTER)", "missing_option")
        if endpoint(made.master_server_address) is None and "://" not in made.master_server_address:
            raise invalid("master_server_address", "must be host:port")
        made.device_of(0)
        return made

    def check(self, facts: StoreFacts) -> list[str]:
        """The segment holds pages (F49); what would be ignored in silence."""
        if facts.page_bytes < 1:
            raise invalid("page_bytes", "of this engine is below one", "bad_geometry")
        warnings = []
        share = self.segment_bytes(facts.tp_size * facts.pp_size)
        if self.global_segment_size and share < max(MIN_SEGMENT, facts.page_bytes):
            raise invalid("global_segment_size", f"gives each rank {share} bytes, less than a page", "bad_geometry")
        if not self.global_segment_size:
            warnings.append("global_segment_size is 0: pages are stored only while another node contributes memory")
        if self.protocol == "rdma" and not _has_rdma():
            warnings.append("protocol is rdma and this host has no RDMA device: Mooncake falls back to tcp by itself")
        if self.enable_group_semantics:
            warnings.append("enable_group_semantics has no effect: a page is one object")
        return warnings

    def segment_bytes(self, ranks: int) -> int:
        """What one of the engine's ``ranks`` (tp x pp) contributes, as SGLang shares it out."""
        size = self.global_segment_size
        return (size if isinstance(size, int) else 0) // max(1, ranks)

    def device_of(self, tp_rank: int) -> str:
        """Devices of one rank.

        Raises:
            InvalidConfig: a per-rank map that is no JSON object of strings.
        """
        text = (self.device_name or "").strip()
        if not text.startswith("{"):
            return text
        try:
            found = msgspec.json.decode(text, type=dict[str, str])
        except msgspec.DecodeError:
            found = None
        if found is None:
            raise invalid("device_name", "must be a list with commas, or a JSON object of tp rank to such a list")
        return found.get(str(tp_rank), "")


def endpoint(address: str) -> tuple[str, int] | None:
    """``host:port``, also behind ``scheme://`` and before a path; None when it is no such thing."""
    rest = address.partition("://")[2] or address
    host, colon, port = rest.partition("/")[0].rpartition(":")
    if not colon or not host or set(host) & set(";,") or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def _value(options: MooncakeOptions, name: str, file: Mapping[str, Any], env: Mapping[str, str]) -> Any:
    given = getattr(options, name)
    if given is None:
        given = file.get(name)
    if given is not None:
        return given
    variables, default = _FALLBACKS[name]
    text = next((env[variable] for variable in variables if env.get(variable)), None)
    if text is None:
        return default
    if isinstance(default, bool):
        return _bool(name, text)
    if name == "master_metrics_port":
        return _int(name, text)
    return text


def _bool(name: str, text: str) -> bool:
    found = _BOOLS.get(text.strip().lower())
    if found is None:
        raise invalid(name, "has a value in the engine's environment that is no boolean")
    return found


def _int(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise invalid(name, "has a value in the engine's environment that is no number")
    return int(text)


def _config_file(env: Mapping[str, str]) -> dict[str, Any]:
    """The file that SGLang's variable names, known keys only (SGLang ignores the others too)."""
    path = env.get(CONFIG_ENV)
    if not path:
        return {}
    try:
        with open(path, "rb") as found:
            values = json.loads(found.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise invalid(CONFIG_ENV, "names a file that cannot be read as a JSON object", "syntax")
    known = {name: value for name, value in values.items() if name in _FALLBACKS and value is not None}
    try:
        msgspec.convert(known, MooncakeOptions)
    except msgspec.ValidationError:
        raise invalid(CONFIG_ENV, "names a file with a value of the wrong type", "bad_type") from None
    return known


def _has_rdma() -> bool:
    try:
        return bool(os.listdir(RDMA_DEVICES))
    except OSError:
        return False
