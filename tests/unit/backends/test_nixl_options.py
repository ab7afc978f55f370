"""Options of ``nixl``: SGLang's two forms come to one; what belongs to another plugin is refused. No package needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends import nixl_probe
from hicache_hooks.backends.nixl_options import BUCKET_ENV, DIR_ENV, DIRECT_ENV, PLUGIN_ENV, NixlOptions
from hicache_hooks.backends.options import StoreFacts
from hicache_hooks.cache.config import typed_options
from hicache_hooks.cache.config_redact import redact, secret_fields
from hicache_proto.errors import BackendUnavailable, InvalidConfig


def effective(env: dict[str, str] | None = None, **values: Any) -> NixlOptions:
    made = typed_options(values, NixlOptions).effective(env or {})
    assert isinstance(made, NixlOptions)
    return made


def refused(env: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    with pytest.raises(InvalidConfig) as caught:
        effective(env, **values)
    assert "s3cret" not in str(caught.value) + json.dumps(caught.value.details), "F94"
    return caught.value.details


def test_the_long_and_the_flat_form_are_the_same() -> None:
    """SGLang's sample, switches and numbers as strings or not, inactive sections beside it."""
    flat = effective(storage_dir="/a", use_uring="true", ios_pool_size="1024")
    plugin = {
        "gds": {"batch_limit": 128},
        "posix": {"active": "true", "use_uring": True, "ios_pool_size": 1024},
        "3fs": {"active": False, "mount_point": "/mnt/3fs"},
    }
    assert effective(storage_dir="/a", plugin=plugin) == flat
    assert (flat.chosen, flat.use_uring, flat.ios_pool_size, flat.use_direct_io) == ("POSIX", True, 1024, True)
    assert flat.parameters({}) == {"use_uring": "true", "ios_pool_size": "1024"}
    assert flat.effective({}) == flat, "effective options stay what they are"


def test_variables_count_after_options() -> None:
    env = {DIR_ENV: "/x, /y/", DIRECT_ENV: "false", PLUGIN_ENV: "POSIX"}
    made = effective(env)
    assert (made.storage_dir, made.use_direct_io) == ("/x,/y", False)
    made = effective(env, storage_dir="/z", use_direct_io=True)
    assert (made.storage_dir, made.use_direct_io) == ("/z", True)
    assert effective({**env, PLUGIN_ENV: "GDS_MT"}, thread_count=4).parameters({}) == {"thread_count": "4"}
    assert effective({BUCKET_ENV: "abc", PLUGIN_ENV: "OBJ"}).bucket == "abc"
    assert effective(bucket="abc").chosen == "OBJ", "a bucket in the flat form means objects"


def test_what_cannot_work_is_refused_and_named() -> None:
    assert refused()["reason"] == "missing_option"
    assert refused({PLUGIN_ENV: "OBJ"})["key"] == "bucket"
    assert refused({PLUGIN_ENV: "NOPE"}, storage_dir="/a")["reason"] == "unknown_plugin"
    assert refused(storage_dir="relative")["key"] == "storage_dir"
    assert refused(storage_dir="/a,/b/../a")["key"] == "storage_dir"
    assert refused(storage_dir="/a", use_uring=True, use_aio=True)["key"] == "use_uring"
    assert refused(storage_dir="/a", thread_count=2)["reason"] == "wrong_plugin"
    assert (
        refused(plugin={"posix": {"active": False, "use_uring": True}}, storage_dir="/a")["reason"]
        == "no_active_plugin"
    )
    assert refused(plugin={"obj": {"active": True, "bucket": "b", "secrete_key": "s3cret"}})["reason"] == "unknown_key"
    assert refused(plugin={"obj": {"active": True, "bucket": "b", "num_threads": "s3cret"}})["reason"] == "bad_type"
    low = {"l3_cleaner_low_watermark": 90.0}
    assert refused(storage_dir="/a", **low)["key"] == "l3_cleaner_low_watermark"


def test_unknown_names_bring_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'use_uring'"):
        effective(storage_dir="/a", use_urin=True)
    with pytest.raises(InvalidConfig, match="did you mean 'secret_key'"):
        effective(plugin={"obj": {"active": True, "bucket": "b", "secrete_key": "x"}})


def test_secrets_are_secrets_in_both_forms() -> None:
    """F94: the digest and the redaction look at the flat struct."""
    inline, files = secret_fields(NixlOptions)
    assert inline == {"access_key", "secret_key", "session_token"}
    assert files == {f"{name}_file" for name in inline}
    values = {"plugin": {"obj": {"active": True, "bucket": "abc", "access_key": "s3cret1", "secret_key": "s3cret2"}}}
    assert "s3cret" not in redact(json.dumps(values), values, inline)
    made = effective(**values)
    assert (made.secret_key, made.plugin) == ("s3cret2", {"obj": {}})
    for name in sorted(inline):
        assert refused(bucket="b", **{name: "s3cret", f"{name}_file": "/k"})["key"] == name
    assert effective(plugin={"obj": {"active": True, "bucket": "b", "session_token_file": "/k"}}).session_token_file


def test_a_plugin_that_needs_a_driver_is_really_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F66: not the list of names decides, and a probe that hangs is killed."""
    facts = StoreFacts(layout="page_first", page_bytes=4096, l2_pages=8)
    posix = effective(storage_dir="/a")
    assert posix.check(facts) == []
    gds = effective({PLUGIN_ENV: "GDS"}, storage_dir="/a")
    monkeypatch.setattr(nixl_probe, "package", lambda: "tests_no_such_nixl")
    with pytest.raises(BackendUnavailable) as caught:
        gds.check(facts)
    assert caught.value.details["reason"] == "plugin_unavailable"
    monkeypatch.setattr(nixl_probe, "PROBE_S", 0.3)
    monkeypatch.setattr(nixl_probe, "_CHILD", "import threading; threading.Event().wait(60)")
    with pytest.raises(BackendUnavailable) as caught:
        gds.check(facts)
    assert caught.value.details["reason"] == "probe_timeout"
    monkeypatch.setattr(nixl_probe, "PROBE_S", 30)
    monkeypatch.setattr(nixl_probe, "_CHILD", "print('created')")
    assert gds.check(facts) == []


def test_an_old_version_is_missing_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_probe, "package", lambda: "nixl_cu12")
    monkeypatch.setattr(nixl_probe, "version", lambda: (1, 4, 1))
    (said,) = nixl_probe.missing()
    assert "1.4.1" in said
    monkeypatch.setattr(nixl_probe, "version", lambda: (1, 5, 1))
    assert nixl_probe.missing() == []
    monkeypatch.setattr(nixl_probe, "package", lambda: None)
    assert nixl_probe.missing() == ["nixl (extra 'nixl')"]
