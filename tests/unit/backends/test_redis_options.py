"""Options of ``redis``; the store itself meets a real server in ``tests/stores``. No package needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_hooks.backends.options import StoreFacts
from hicache_hooks.backends.redis import RedisOptions, RedisStore
from hicache_hooks.backends.redis_errors import plain
from hicache_hooks.backends.secret_text import secret_of
from hicache_hooks.cache.config import typed_options
from hicache_hooks.cache.config_redact import redact, secret_fields
from hicache_hooks.describe import describe_exception
from hicache_proto.errors import InvalidConfig


def effective(**values: Any) -> RedisOptions:
    made = typed_options(values, RedisOptions).effective({})
    assert isinstance(made, RedisOptions)
    return made


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        ("redis://h", "redis://h", None),
        ("redis://h:6380/2", "redis://h:6380/2", None),
        ("rediss://me:p%40ss@h/1", "rediss://me@h/1", "p@ss"),
        ("redis://:pw@[::1]:7000", "redis://[::1]:7000", "pw"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", None),
    ],
)
def test_a_password_leaves_the_url(url: str, bare: str, password: str | None) -> None:
    """So that the digest and every message treat it as the secret that it is."""
    made = effective(url=url)
    assert (made.url, made.password) == (bare, password)
    assert made.effective({}) == made


@pytest.mark.parametrize(
    "values",
    [
        {"url": "http://h"},
        {"url": "redis://h:port"},
        {"url": "redis://h?password=s3cret"},
        {"url": "redis://h/zero"},
        {"url": "unix://relative"},
        {"url": "redis://:s3cret@h", "password_file": "/k"},
        {"url": "redis://h", "password": "s3cret", "password_file": "/k"},
        {"url": "redis://h", "ttl_s": 0},
        {"url": "redis://h", "timeout_s": 0},
        {"url": ""},
    ],
)
def test_what_cannot_work_is_refused_without_its_value(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        effective(**values)
    assert "s3cret" not in str(caught.value) + json.dumps(caught.value.details), "F94"


def test_unknown_names_bring_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'password_file'"):
        effective(url="redis://h", password_fil="/k")


def test_secrets_are_marked_masked_and_read(tmp_path: Path) -> None:
    assert secret_fields(RedisOptions) == ({"password"}, {"password_file"})
    values = {"url": "redis://:s3cret@h", "password": "s3cret"}
    assert "s3cret" not in redact(json.dumps(values), values, {"password"})
    (tmp_path / "pw").write_text("s3cret\n")
    env = {"HICACHE_CONFIG_DIRS": str(tmp_path)}
    options = effective(url="redis://h", password_file=str(tmp_path / "pw"))
    assert secret_of(options, "password", env) == "s3cret"
    with pytest.raises(InvalidConfig):
        secret_of(options, "password", {"HICACHE_CONFIG_DIRS": "/nowhere"})
    assert secret_of(effective(url="redis://h"), "password", {"VAR": "x"}, "VAR") == "x"


def test_pages_beyond_a_string_are_refused() -> None:
    """F49."""
    options = effective(url="redis://h")
    for wrong in (0, (512 << 20) + 4096):
        with pytest.raises(InvalidConfig):
            options.check(StoreFacts(layout="page_first", page_bytes=wrong, l2_pages=8))
    assert options.check(StoreFacts(layout="page_first", page_bytes=4096, l2_pages=8)) == []


def test_the_manifest_takes_every_layout() -> None:
    assert RedisStore.manifest.layouts == ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.stores  # where the package is installed
def test_errors_of_the_client_are_told_in_our_words() -> None:
    """F94: what is said helps, and holds nothing that was sent."""
    from redis import exceptions as theirs

    def said(exc: Exception) -> str:
        with pytest.raises(OSError) as caught:
            plain(exc)
        return describe_exception(caught.value)

    gone = theirs.ConnectionError("Error 111 connecting to s3cr3t")
    gone.__cause__ = ConnectionRefusedError(111, "s3cr3t")
    assert said(gone) == "redis: no connection (ConnectionRefusedError: Connection refused)"
    assert said(theirs.AuthenticationError("s3cr3t")).startswith("redis: the server refuses this user or password")
    assert said(theirs.ResponseError("READONLY You can't write s3cr3t")) == "redis: ResponseError READONLY"
    assert said(theirs.ResponseError("s3cr3t is no index")) == "redis: ResponseError"
