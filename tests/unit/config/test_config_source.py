"""Files named by a config: only below the allowed directories, and never opened outside (F52)."""

import os
import socket
import threading
from pathlib import Path

import pytest

from hicache_hooks.cache import config_source
from hicache_hooks.cache.config_source import config_dirs, config_format, read_text
from hicache_proto.errors import InvalidConfig


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Path, dict[str, str]]:
    inside, outside = tmp_path / "allowed", tmp_path / "outside"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "ok.json").write_text('{"a": 1}')
    (outside / "no.json").write_text('{"secret": 1}')
    return inside, outside, {"HICACHE_CONFIG_DIRS": f"/nowhere:{inside}"}


def refused(path: str, env: dict[str, str]) -> str:
    with pytest.raises(InvalidConfig) as caught:
        read_text(path, env)
    return str(caught.value.details["reason"])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names given to os.open by the module."""
    names: list[str] = []
    real = os.open

    def spy(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        names.append(str(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(config_source.os, "open", spy)
    return names


def test_a_file_inside_is_read(tree: tuple[Path, Path, dict[str, str]]) -> None:
    inside, _, env = tree
    assert read_text(f"{inside}/ok.json", env) == '{"a": 1}'
    assert read_text(f"{inside}/sub/../ok.json", env) == '{"a": 1}'


def test_paths_that_lead_out_are_never_opened(tree: tuple[Path, Path, dict[str, str]], opened: list[str]) -> None:
    """F52: elsewhere, ``..`` out, a link out, a linked directory out, and a sibling with the same prefix."""
    inside, outside, env = tree
    (inside / "link.json").symlink_to(outside / "no.json")
    (inside / "dir").symlink_to(outside)
    sibling = inside.parent / "allowed-not"
    sibling.mkdir()
    (sibling / "x.json").write_text("{}")
    for path in (
        "/etc/shadow",
        f"{outside}/no.json",
        f"{inside}/../outside/no.json",
        f"{inside}/link.json",
        f"{inside}/dir/no.json",
        f"{sibling}/x.json",
        f"{inside}",
        f"{outside}/not-there.json",
    ):
        assert refused(path, env) == "outside_config_dirs", path
    assert opened == []


def test_links_inside_are_followed(tree: tuple[Path, Path, dict[str, str]]) -> None:
    """A mounted ConfigMap is made of links that stay inside."""
    inside, _, env = tree
    (inside / "alias.json").symlink_to("ok.json")
    assert read_text(f"{inside}/alias.json", env) == '{"a": 1}'


def test_a_component_exchanged_after_the_check_is_refused(
    tree: tuple[Path, Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F52, the race: the resolved path becomes a link out before the open."""
    inside, outside, env = tree
    (inside / "sub" / "no.json").write_text("{}")
    real = config_source._read_below

    def exchange(root: str, parts: list[str]) -> bytes | None:
        (inside / "sub" / "no.json").unlink()
        (inside / "sub").rmdir()
        (inside / "sub").symlink_to(outside)
        return real(root, parts)

    monkeypatch.setattr(config_source, "_read_below", exchange)
    assert refused(f"{inside}/sub/no.json", env) == "unreadable"


def test_what_is_no_regular_file_is_refused_at_once(tree: tuple[Path, Path, dict[str, str]]) -> None:
    """A FIFO without a writer must not hang the agent."""
    inside, _, env = tree
    os.mkfifo(inside / "pipe.json")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(inside / "sock.json"))
        result: list[str] = []
        thread = threading.Thread(target=lambda: result.append(refused(f"{inside}/pipe.json", env)), daemon=True)
        thread.start()
        thread.join(5)
        assert result == ["not_regular"]
        assert refused(f"{inside}/sock.json", env) in ("unreadable", "not_regular")
    assert refused(f"{inside}/sub", env) == "not_regular"


def test_missing_long_and_undecodable_files(tree: tuple[Path, Path, dict[str, str]]) -> None:
    inside, _, env = tree
    assert refused(f"{inside}/missing.json", env) == "unreadable"
    (inside / "long.json").write_bytes(b" " * (config_source.MAX_TEXT_BYTES + 1))
    assert refused(f"{inside}/long.json", env) == "not_regular"
    (inside / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert refused(f"{inside}/latin.json", env) == "syntax"
    assert refused("relative.json", env) == "bad_path"


def test_no_descriptor_is_left(tree: tuple[Path, Path, dict[str, str]]) -> None:
    inside, _, env = tree
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_text(f"{inside}/ok.json", env)
        refused(f"{inside}/missing.json", env)
        refused(f"{inside}/sub", env)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["x.ini", "x", "x.json.bak", "x.yml", "x.JSON"])
def test_other_suffixes_name_the_three(name: str) -> None:
    """F52: unsupported formats are refused by name."""
    with pytest.raises(InvalidConfig) as caught:
        config_format(f"/etc/hicache/{name}")
    assert caught.value.details == {"reason": "unknown_format", "allowed": ["json", "toml", "yaml"]}
    assert all(f".{fmt}" in caught.value.message for fmt in ("json", "toml", "yaml"))


def test_directories_come_from_the_environment() -> None:
    assert config_dirs({}) == ["/etc/hicache"]
    assert config_dirs({"HICACHE_CONFIG_DIRS": "/a:relative::/b"}) == ["/a", "/b"]
    assert config_dirs({"HICACHE_CONFIG_DIRS": ""}) == []
