"""The runtime directory (F96) and what a reload changes."""

from pathlib import Path

import pytest

from hicache_sidecar.core.actor import Role
from hicache_sidecar.daemon.config import ConfigError, load
from hicache_sidecar.daemon.live import Live
from hicache_sidecar.daemon.paths import PathError, PublicPaths, prepare_runtime_dir
from hicache_sidecar.daemon.settings import Settings


def test_directory_is_made_and_kept(tmp_path: Path) -> None:
    prepare_runtime_dir(tmp_path / "run")
    prepare_runtime_dir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o750


def test_no_fallback_and_clear_text(tmp_path: Path) -> None:
    """F96: nothing is guessed; the text says what to set."""
    for path in (tmp_path / "a" / "b", Path("/proc/nope")):
        with pytest.raises(PathError, match="RuntimeDirectory="):
            prepare_runtime_dir(path)
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match="is not a directory"):
        prepare_runtime_dir(tmp_path / "file")


def test_a_directory_that_all_can_write_is_refused(tmp_path: Path) -> None:
    """F96: /tmp itself, sticky or not."""
    with pytest.raises(PathError, match="everybody can write"):
        prepare_runtime_dir(Path("/tmp"))


@pytest.mark.needs_root
def test_a_directory_of_another_user_is_refused_for_a_plain_user(tmp_path: Path) -> None:
    import os

    target = tmp_path / "run"
    target.mkdir()
    os.chown(target, 4242, 4242)
    with pytest.raises(PathError, match="belongs to uid 4242"):
        prepare_runtime_dir(target)


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def test_reload_changes_access_and_tokens_or_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, token = tmp_path / "c.toml", tmp_path / "token"
    put(token, "first-token-0123456789")
    text = f'[http]\ntoken_file = "{token}"\n'
    put(config, text)

    def read() -> Settings:
        return load({}, {}, config)

    live = Live(read())
    before = live.tokens
    put(token, "second-token-0123456789")
    put(config, text + '[access.users]\n4242 = "operator"\n[leases]\nprepared_s = 99\n')
    assert live.reload(read)
    assert live.tokens != before
    assert live.access.users == {4242: Role.OPERATOR}
    assert "leases" in caplog.text
    for broken in ("nonsense", '[access.users]\nno-such-user = "viewer"', "[http]"):
        put(config, broken)
        kept = (live.access, live.tokens)
        assert not live.reload(read)
        assert (live.access, live.tokens) == kept


def test_unknown_names_in_access_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no user is named"):
        Live(load({}, {"HICACHE_SIDECAR_ACCESS_USERS": "no-such-user=viewer"}))


def test_a_socket_name_that_was_taken_away_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else would tell it: whoever is connected goes on, whoever comes finds nobody."""
    one, other = tmp_path / "control.sock", tmp_path / "hooks.sock"
    one.touch()
    other.touch()
    paths = PublicPaths([one, other])
    assert paths.gone() == []
    one.unlink()
    assert [paths.gone(), paths.gone()] == [["control.sock"], ["control.sock"]]
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(other)
    assert paths.gone() == ["control.sock", "hooks.sock"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
