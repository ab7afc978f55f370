"""Bearer tokens: files, roles, and what a wrong one learns."""

import os
from pathlib import Path

import pytest

from hicache_proto.errors import Unauthenticated
from hicache_sidecar.core.actor import Role
from hicache_sidecar.obs.logging import redact
from hicache_sidecar.server.auth import CREDENTIAL, VIEWER_CREDENTIAL, TokenError, Tokens, read_token

FULL, VIEWER = "full-token-0123456789", "viewer-token-0123456789"


def put(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_roles(tmp_path: Path) -> None:
    tokens = Tokens.load(put(tmp_path / "f", FULL + "\n"), put(tmp_path / "v", VIEWER))
    assert tokens.actor(f"Bearer {FULL}").role is Role.ADMIN
    assert tokens.actor(f"bearer  {VIEWER}").role is Role.VIEWER
    for wrong in (
        None,
        "",
        FULL,
        f"Basic {FULL}",
        "Bearer",
        "Bearer ",
        f"Bearer {FULL}x",
        f"Bearer {FULL[:-1]}",
        "Bearer \xff",
    ):
        with pytest.raises(Unauthenticated):
            tokens.actor(wrong)


def test_without_token_loopback_is_operator() -> None:
    assert not Tokens().required
    assert Tokens().actor(None).role is Role.OPERATOR


def test_tokens_are_not_kept_in_clear(tmp_path: Path) -> None:
    assert FULL not in repr(Tokens.load(put(tmp_path / "f", FULL), None))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words here 0123456", b"line1-0123456789\nline2-0123456789", b"\xff" * 20, b"x" * 5000]
)
def test_bad_files_are_refused_without_showing_them(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenError) as caught:
        read_token(put(tmp_path / "token", content))
    assert str(tmp_path / "token") in str(caught.value)
    assert "0123456" not in str(caught.value)
    assert str(tmp_path / "token") in redact(str(caught.value))  # the log still says which file


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="written by everybody"):
        read_token(put(tmp_path / "token", FULL, 0o666))
    with pytest.raises(TokenError, match="No such file"):
        read_token(tmp_path / "missing")


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    """Opening one blocks until somebody writes: the daemon's start, and its loop at a reload."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(TokenError, match=r"not a regular file|Is a directory"):
            read_token(path)


def test_viewer_token_alone_and_equal_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"needs http\.token_file"):
        Tokens.load(None, put(tmp_path / "v", VIEWER))
    with pytest.raises(TokenError, match="same token"):
        Tokens.load(put(tmp_path / "f", FULL), put(tmp_path / "v", FULL))


def test_systemd_credentials_stand_in(tmp_path: Path) -> None:
    put(tmp_path / CREDENTIAL, FULL, 0o400)
    put(tmp_path / VIEWER_CREDENTIAL, VIEWER, 0o400)
    tokens = Tokens.load(None, None, tmp_path)
    assert tokens.actor(f"Bearer {FULL}").role is Role.ADMIN
    assert tokens.actor(f"Bearer {VIEWER}").role is Role.VIEWER
    assert not Tokens.load(None, None, tmp_path / "none").required
