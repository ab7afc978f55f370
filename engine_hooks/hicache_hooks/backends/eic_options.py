"""Options of ``eic``: the keys of its client's YAML, inline or from a file, and two of our own beside them."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

from hicache_hooks.backends.options import BackendOptions, StoreFacts, invalid
from hicache_hooks.cache.config_source import read_text

CONFIG_ENV = "REMOTE_EIC_YAML"
MAX_CONFIG_BYTES = 1 << 20
NO_TTL = -1
_SCHEME = "eic://"
_NOT_HERE = "taken and without effect: pages go from and to host memory"


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class EicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The YAML's keys, as SGLang's and AIBrix's backends read them. Those of GPU memory do not apply to host pages."""

    remote_url: Annotated[str | None, _doc('required: "eic://host:port"')] = None
    eic_instance_id: Annotated[str | None, _doc("required: the instance's id")] = None
    eic_log_dir: Annotated[str | None, _doc("of the client's log, absolute; default the client's own")] = None
    eic_log_level: Annotated[int, _doc("the client's LogLevel")] = 2
    eic_trans_type: Annotated[int, _doc("the client's TransportType")] = 3
    eic_flag_file: Annotated[str | None, _doc("the client's flag file; default none")] = None
    eic_thread_num: Annotated[int | None, _doc("default none; taken and not used: callers only log it")] = None
    eic_namespace: Annotated[str | None, _doc("SGLang's name of the namespace; default none")] = None
    eic_kv_ns: Annotated[str | None, _doc("AIBrix's name of the namespace; default none")] = None
    eic_kv_ttl: Annotated[int | None, _doc("AIBrix's name of ttl_second; default none")] = None
    enable_kvset_direct: Annotated[bool, _doc("put from registered memory")] = True
    enable_kvget_direct: Annotated[bool, _doc("get into registered memory")] = True
    enable_kvset_gpu_direct: Annotated[bool, _doc(_NOT_HERE)] = False
    enable_kvget_gpu_direct: Annotated[bool, _doc(_NOT_HERE)] = False
    enable_gpu_nic_affinity: Annotated[bool, _doc(_NOT_HERE)] = False
    gpu_nic_affinity_config: Annotated[str | None, _doc(f"default none; {_NOT_HERE}")] = None
    cpu_nic_affinity_config: Annotated[str | None, _doc(f"default none; {_NOT_HERE}")] = None


class EicOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``eic``."""

    config: Annotated[
        EicConfig | str | None,
        _doc(f"the YAML's keys, or the path of the YAML (below HICACHE_CONFIG_DIRS); else the file of ${CONFIG_ENV}"),
    ] = None
    namespace: Annotated[str | None, _doc("EIC's namespace; else the YAML's eic_namespace, eic_kv_ns")] = None
    ttl_second: Annotated[int | None, _doc("lifetime of a page, s; -1: for ever; else the YAML's eic_kv_ttl, -1")] = (
        None
    )

    def effective(self, env: Mapping[str, str]) -> Self:
        """The config read, namespace and lifetime filled in.

        Raises:
            InvalidConfig: no config anywhere, or one that cannot be used.
        """
        config = self.config if isinstance(self.config, EicConfig) else self._read(env)
        if not config.remote_url or not config.remote_url.removeprefix(_SCHEME):
            raise invalid("config", "must hold remote_url, such as eic://host:port", "missing_option")
        if not config.eic_instance_id:
            raise invalid("config", "must hold eic_instance_id", "missing_option")
        if config.eic_log_dir is not None and not os.path.isabs(config.eic_log_dir):
            raise invalid("config", "eic_log_dir must be an absolute path")
        ttl = next((t for t in (self.ttl_second, config.eic_kv_ttl) if t is not None), NO_TTL)
        if ttl != NO_TTL and ttl < 1:
            raise invalid("ttl_second", "must be at least 1, or -1 for no end")
        names = (self.namespace, config.eic_namespace, config.eic_kv_ns)
        namespace = next((name for name in names if name is not None), "")
        return msgspec.structs.replace(self, config=config, namespace=namespace, ttl_second=ttl)

    def _read(self, env: Mapping[str, str]) -> EicConfig:
        from hicache_hooks.cache.config_yaml import load  # PyYAML, only when a file is read

        if isinstance(self.config, str):
            text = read_text(self.config, env, "eic config")
        else:
            text = _from_variable(env.get(CONFIG_ENV, ""))
        document = load(text)
        try:
            return msgspec.convert(document, EicConfig)
        except msgspec.ValidationError as exc:
            key = str(exc).rpartition("`")[0].rpartition("`")[2]  # the key or path, never a value (F94)
        raise invalid("config", f"the YAML cannot be used: see {key!r}", "bad_file")

    def check(self, facts: StoreFacts) -> list[str]:
        """Says what of the YAML does nothing here."""
        if facts.page_bytes < 1:
            raise invalid("page_bytes", "of this engine is below one", "bad_geometry")
        config = self.config
        if isinstance(config, EicConfig) and (
            config.enable_kvset_gpu_direct or config.enable_kvget_gpu_direct or config.enable_gpu_nic_affinity
        ):
            return ["GPU direct and NIC affinity of the EIC config do nothing here: pages go from and to host memory"]
        return []


def endpoint_of(config: EicConfig) -> str:
    """``host:port``."""
    return (config.remote_url or "").removeprefix(_SCHEME)


def _from_variable(path: str) -> str:
    """The file that the engine's owner named in the environment."""
    if not path:
        raise invalid("config", f"must be given (or {CONFIG_ENV} on the engine's host)", "missing_option")
    try:
        with open(path, "rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        pass
    raise invalid("config", f"the file of {CONFIG_ENV} cannot be read", "bad_file")
