"""Options of ``nixl``: SGLang's names, in SGLang's two forms, and what they come to.

Long form: ``{"plugin": {"posix": {"active": true, "use_uring": true}}}``; the first active section counts. Flat form:
the parameters of one plugin at the top level; which one says ``SGLANG_HICACHE_NIXL_BACKEND_PLUGIN``, else a ``bucket``
means ``obj``, else ``posix``. ``effective`` turns both into the same flat struct, so that secrets lie where the digest
and the redaction look for them, and parameters of another plugin than the chosen one are refused.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec

from hicache_hooks.backends.options import BackendOptions, Secret, SecretFile, StoreFacts, invalid

DIR_ENV = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
PLUGIN_ENV = "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"
DIRECT_ENV = "SGLANG_HICACHE_NIXL_USE_DIRECT_IO"
BUCKET_ENV = "AWS_DEFAULT_BUCKET"
# NIXL's own name -> what of its parameters we pass on, by our (SGLang's) names.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "POSIX": ("use_aio", "use_uring", "use_posix_aio", "ios_pool_size", "kernel_queue_size"),
    "OBJ": (
        "bucket", "endpoint_override", "scheme", "region", "access_key", "secret_key", "session_token",
        "use_virtual_addressing", "req_checksum", "resp_checksum", "ca_bundle", "num_threads", "crtMinLimit",
        "throughput_target_gbps",
    ),
    "GDS": ("batch_pool_size", "batch_limit", "max_request_size"),
    "GDS_MT": ("thread_count",),
    "3FS": ("mount_point", "mem_config", "iopool_size"),
}  # fmt: skip
FILE_PLUGINS = ("POSIX", "GDS", "GDS_MT", "3FS")
_TRUE, _FALSE = ("true", "True", "1"), ("false", "False", "0")

# SGLang's sample writes numbers and switches as strings; both are taken.
Flag = bool | Literal["true", "True", "1", "false", "False", "0"]
Count = Annotated[int, msgspec.Meta(ge=1)] | Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,12}$")]


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class NixlOptions(BackendOptions, frozen=True, kw_only=True):
    """Options of ``nixl``. All but the first three groups belong to one plugin."""

    plugin: Annotated[
        dict[Literal["posix", "obj", "gds", "gds_mt", "3fs"], dict[str, Any]] | None,
        _doc("long form: parameters by plugin, each with 'active'; default: the flat form"),
    ] = None
    storage_dir: Annotated[str | None, _doc(f"directories of the file plugins, comma list; else ${DIR_ENV}")] = None
    use_direct_io: Annotated[
        Flag | None, _doc(f"open files with O_DIRECT where the file system can; else ${DIRECT_ENV}, else true")
    ] = None
    timeout_s: Annotated[float, _doc("longest wait for one batch of obj, in seconds", gt=0, le=600)] = 10.0
    l3_cleaner_enabled: Annotated[bool, _doc("delete the oldest pages of file plugins when the disk fills")] = True
    l3_cleaner_high_watermark: Annotated[float, _doc("% of the disk in use that starts it", gt=0, le=100)] = 80.0
    l3_cleaner_low_watermark: Annotated[float, _doc("% of the disk in use that ends it", gt=0, le=100)] = 70.0
    # posix
    use_aio: Annotated[Flag | None, _doc("posix: libaio (the default)")] = None
    use_uring: Annotated[Flag | None, _doc("posix: io_uring; default false")] = None
    use_posix_aio: Annotated[
        Flag | None, _doc("posix: POSIX AIO (libc's threads); an error costs a new agent; default false")
    ] = None
    ios_pool_size: Annotated[Count | None, _doc("posix: I/O slots of the agent (NIXL: 65536)")] = None
    kernel_queue_size: Annotated[Count | None, _doc("posix: depth of the kernel's queue (NIXL: 256)")] = None
    # obj
    bucket: Annotated[str | None, _doc(f"obj: bucket; else ${BUCKET_ENV}")] = None
    endpoint_override: Annotated[str | None, _doc("obj: URL or host:port; default AWS")] = None
    scheme: Annotated[Literal["http", "https"] | None, _doc("obj: default http, as NIXL's")] = None
    region: Annotated[str | None, _doc("obj: region; else $AWS_REGION, $AWS_DEFAULT_REGION, us-east-1")] = None
    access_key: Annotated[Secret | None, _doc("obj: else $AWS_ACCESS_KEY_ID")] = None
    secret_key: Annotated[Secret | None, _doc("obj: else $AWS_SECRET_ACCESS_KEY")] = None
    session_token: Annotated[Secret | None, _doc("obj: else $AWS_SESSION_TOKEN")] = None
    access_key_file: Annotated[SecretFile | None, _doc("obj: file that holds access_key, else the variable")] = None
    secret_key_file: Annotated[SecretFile | None, _doc("obj: file that holds secret_key, else the variable")] = None
    session_token_file: Annotated[SecretFile | None, _doc("obj: file that holds session_token, else the variable")] = (
        None
    )
    use_virtual_addressing: Annotated[Flag | None, _doc("obj: bucket in the host name; default false")] = None
    req_checksum: Annotated[Literal["required", "supported"] | None, _doc("obj: default required")] = None
    resp_checksum: Annotated[Literal["required", "supported"] | None, _doc("obj: default required")] = None
    ca_bundle: Annotated[str | None, _doc("obj: file of certificates to trust; default the system's")] = None
    num_threads: Annotated[Count | None, _doc("obj: client threads (NIXL: 4)")] = None
    crtMinLimit: Annotated[Count | None, _doc("obj: bytes from which the CRT client is used; default NIXL's")] = None
    throughput_target_gbps: Annotated[Count | None, _doc("obj: CRT client's target; default NIXL's")] = None
    # gds, gds_mt, 3fs
    batch_pool_size: Annotated[Count | None, _doc("gds: requests per batch; default NIXL's")] = None
    batch_limit: Annotated[Count | None, _doc("gds: requests at once; default NIXL's")] = None
    max_request_size: Annotated[Count | None, _doc("gds: bytes of one request; default NIXL's")] = None
    thread_count: Annotated[Count | None, _doc("gds_mt: worker threads; default NIXL's")] = None
    mount_point: Annotated[str | None, _doc("3fs: mount point; default NIXL's")] = None
    mem_config: Annotated[Literal["dram", "dram_zc", "auto"] | None, _doc("3fs: memory mode; default NIXL's")] = None
    iopool_size: Annotated[Count | None, _doc("3fs: I/O pool; default NIXL's")] = None

    def effective(self, env: Mapping[str, str]) -> Self:
        """The flat form of the chosen plugin: ``plugin`` is ``{name: {}}``, switches are booleans.

        Raises:
            InvalidConfig: no active plugin, parameters of another one, no directory or bucket.
        """
        name, given = self._chosen(env)
        wrong = ""
        flat = self
        try:
            flat = msgspec.convert({**_given(self), **given, "plugin": {name.lower(): {}}}, type(self), strict=True)
        except msgspec.ValidationError as exc:  # its text may quote the value (F94)
            wrong = str(exc).rpartition("`$.")[2].rstrip("`")
        if wrong:
            raise invalid(f"plugin.{name.lower()}.{wrong}", "has a wrong type or range", "bad_type")
        foreign = [f for other, names in PARAMETERS.items() if other != name for f in names if getattr(flat, f)]
        if foreign:
            raise invalid(foreign[0], f"is no parameter of the plugin {name.lower()}", "wrong_plugin")
        return flat._files(env) if name in FILE_PLUGINS else flat._object(env)

    def _chosen(self, env: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
        if self.plugin is None:
            wished = env.get(PLUGIN_ENV, "auto").upper()
            if wished == "AUTO":
                wished = "OBJ" if self.bucket else "POSIX"
            if wished not in PARAMETERS:
                raise invalid("plugin", f"{PLUGIN_ENV} names none of {', '.join(PARAMETERS).lower()}", "unknown_plugin")
            return wished, {}
        for name, section in self.plugin.items():
            known = (*PARAMETERS[name.upper()], "active", *_FILES.get(name, ()))
            for key in section:
                if key not in known:
                    near = difflib.get_close_matches(key, known, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                    raise invalid(f"plugin.{name}", f"has an unknown parameter; {hint}", "unknown_key")
            if section.get("active") in (True, *_TRUE):
                return name.upper(), {key: value for key, value in section.items() if key != "active"}
        if self.plugin and all(not section for section in self.plugin.values()) and len(self.plugin) == 1:
            return next(iter(self.plugin)).upper(), {}  # the effective form again
        raise invalid("plugin", "has no active section", "no_active_plugin")

    def _files(self, env: Mapping[str, str]) -> Self:
        dirs = [part.strip() for part in (self.storage_dir or env.get(DIR_ENV) or "").split(",") if part.strip()]
        if not dirs:
            raise invalid("storage_dir", f"must be given (or {DIR_ENV} on the engine's host)", "missing_option")
        if not all(map(os.path.isabs, dirs)):
            raise invalid("storage_dir", "must hold absolute paths")
        dirs = [os.path.normpath(path) for path in dirs]
        if len(set(map(os.path.realpath, dirs))) != len(dirs):
            raise invalid("storage_dir", "names a directory twice")
        if self.l3_cleaner_low_watermark >= self.l3_cleaner_high_watermark:
            raise invalid("l3_cleaner_low_watermark", "must be below l3_cleaner_high_watermark")
        direct = self.use_direct_io if self.use_direct_io is not None else env.get(DIRECT_ENV, "true").lower()
        modes = {key: flag(getattr(self, key)) for key in ("use_aio", "use_uring", "use_posix_aio")}
        if list(modes.values()).count(True) > 1:
            raise invalid("use_uring", "excludes use_aio and use_posix_aio")
        made = msgspec.structs.replace(self, storage_dir=",".join(dirs), use_direct_io=flag(direct), **modes)
        return made._numbers()

    def _object(self, env: Mapping[str, str]) -> Self:
        bucket = self.bucket or env.get(BUCKET_ENV)
        if not bucket:
            raise invalid("bucket", f"must be given (or {BUCKET_ENV} on the engine's host)", "missing_option")
        for key in ("access_key", "secret_key", "session_token"):
            if getattr(self, key) and getattr(self, f"{key}_file"):
                raise invalid(key, f"excludes {key}_file")
        region = self.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
        made = msgspec.structs.replace(
            self, bucket=bucket, region=region, use_virtual_addressing=flag(self.use_virtual_addressing) or False,
            endpoint_override=self.endpoint_override or None, scheme=self.scheme or "http",
        )  # fmt: skip
        return made._numbers()

    def _numbers(self) -> Self:
        """Counts that were written as strings."""
        values = {key: getattr(self, key) for key in _COUNTS}
        whole = {key: int(value) for key, value in values.items() if isinstance(value, str)}
        return msgspec.structs.replace(self, **whole)

    def check(self, facts: StoreFacts) -> list[str]:
        """A page must be one; a plugin with a driver is probed for real, in a child (F66)."""
        from hicache_hooks.backends.nixl_probe import require_plugin

        if facts.page_bytes < 1:
            raise invalid("page_bytes", "of this engine is below one", "bad_geometry")
        require_plugin(self.chosen, self.parameters({}))
        return []

    @property
    def chosen(self) -> str:
        """NIXL's name of the plugin; of effective options only."""
        return next(iter(self.plugin or {"posix": {}})).upper()

    def parameters(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """What ``create_backend`` gets: strings, with the contents of secret files put in."""
        values = {key: getattr(self, key) for key in PARAMETERS[self.chosen]} | dict(secrets)
        return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in values.items() if v is not None}


_FILES = {"obj": ("access_key_file", "secret_key_file", "session_token_file")}


def _given(options: NixlOptions) -> dict[str, Any]:
    """Every option that is not its default, but the plugin map."""
    found = {f.name: getattr(options, f.name) for f in msgspec.structs.fields(options) if f.name != "plugin"}
    defaults = {f.name: f.default for f in msgspec.structs.fields(options)}
    return {key: value for key, value in found.items() if value != defaults[key]}


_COUNTS = frozenset(
    ("ios_pool_size", "kernel_queue_size", "num_threads", "crtMinLimit", "throughput_target_gbps", "batch_pool_size",
     "batch_limit", "max_request_size", "thread_count", "iopool_size")
)  # fmt: skip


def flag(value: Any) -> bool | None:
    """A switch that may be written as a string; None stays None."""
    return None if value is None else value is True or value in _TRUE
