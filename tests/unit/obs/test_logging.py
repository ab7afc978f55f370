"""Log lines: journal priorities, JSON, redaction."""

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_sidecar.obs import logging as obs_logging

log = logging.getLogger("hicache.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(style: str, level: str = "debug") -> tuple[io.StringIO, None]:
    stream = io.StringIO()
    obs_logging.setup(level, style, stream)
    return stream, None


def test_journal_prefix_on_every_line() -> None:
    stream, _ = lines("journal")
    log.info("one\ntwo")
    log.warning("careful")
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("bad")
    written = stream.getvalue().splitlines()
    assert written[:3] == ["<6>one", "<6>two", "<4>careful"]
    assert written[3] == "<3>bad"
    assert len(written) > 5
    assert all(line.startswith("<3>") for line in written[3:])


def test_json_lines() -> None:
    stream, _ = lines("json")
    log.error("a %s", "b")
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "hicache.test", "a b")


def test_level_and_repeat_set_up() -> None:
    lines("human")
    stream, _ = lines("human", "warning")
    log.info("no")
    log.warning("yes")
    assert stream.getvalue().count("yes") == 1
    assert "no" not in stream.getvalue()


@pytest.mark.parametrize("style", ["journal", "human", "json"])
def test_secrets_are_taken_out_of_messages_and_tracebacks(style: str) -> None:
    """F94: a sentinel in a message, an argument or an exception is nowhere in the log."""
    stream, _ = lines(style)
    log.warning('config {"password": "S3NTINEL", "url": "redis://u:S3NTINEL@h"} Authorization: Bearer S3NTINEL')
    log.warning("secret_key=%s", "S3NTINEL")
    try:
        raise RuntimeError('cannot log in with {"access_key": "S3NTINEL"}')
    except RuntimeError:
        log.exception("failed")
    assert "S3NTINEL" not in stream.getvalue()
    assert "redacted" in stream.getvalue() or "***" in stream.getvalue()


def test_journal_is_recognised_by_its_inode(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        info = os.fstat(stream.fileno())
        assert obs_logging.is_journal(stream, f"{info.st_dev}:{info.st_ino}")
        assert not obs_logging.is_journal(stream, f"{info.st_dev}:{info.st_ino + 1}")
        for other in (None, "", "x", "1:2:3"):
            assert not obs_logging.is_journal(stream, other)
    assert not obs_logging.is_journal(io.StringIO(), "1:2")
