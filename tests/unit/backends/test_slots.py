"""Directories of one process each: the first free one, given back with the process or by ``release``."""

import os
from pathlib import Path

import pytest

from hicache_hooks.backends.slots import claim, open_locked


def test_each_claim_gets_a_directory_of_its_own_and_a_released_one_is_found_again(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first, second = claim(root), claim(root)
    assert [os.path.basename(slot.path) for slot in (first, second)] == ["slot-0", "slot-1"]
    first.release()
    first.release()
    again = claim(root)
    assert again.path == first.path
    again.release()
    second.release()


def test_a_directory_that_cannot_be_made_leaves_no_lock(tmp_path: Path) -> None:
    """F65: the lock was held by a claim that failed, until the process ended."""
    (tmp_path / "slot-0").write_text("a file stands here")
    with pytest.raises(FileExistsError):
        claim(str(tmp_path))
    fd = open_locked(str(tmp_path / "slot-0.lock"))
    assert fd is not None
    os.close(fd)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_locked(str(tmp_path / "lock"))
    assert not (tmp_path / "elsewhere").exists()
