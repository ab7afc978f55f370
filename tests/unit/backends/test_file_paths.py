"""Directories of the file backends that cannot be: the message says what and why, never where (F94)."""

from pathlib import Path

import pytest

from hicache_hooks.backends.file_paths import DirectoryUnusable, StorePaths, TempArea
from hicache_hooks.describe import describe_exception


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("taken", "Not a directory"),
        ("taken/sub", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a/" * 2500, "too"),  # deep for Python, or long for the system
    ],
)
def test_a_directory_that_cannot_be_is_told(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DirectoryUnusable) as caught:
        StorePaths(str(tmp_path / path), "ns").make()
    said = describe_exception(caught.value)
    assert said.startswith("the storage directory cannot be ")
    assert why in said
    assert str(tmp_path) not in said


def test_a_temporary_area_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "tmp").write_text("a file")
    with pytest.raises(DirectoryUnusable) as caught:
        TempArea(str(tmp_path / "tmp")).open()
    assert "Not a directory" in describe_exception(caught.value)
    assert caught.value.errno
