"""Settings: precedence, unknown keys, types, durations."""

from pathlib import Path
from typing import Any

import pytest

from hicache_sidecar.daemon.config import ConfigError, load
from hicache_sidecar.daemon.settings import Settings, seconds_of, split_address


def read(text: str, tmp_path: Path, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    path = tmp_path / "sidecar.toml"
    path.write_text(text)
    return load({key.replace("__", "."): value for key, value in flags.items()}, environ or {}, path)


def test_defaults_are_those_of_the_contract() -> None:
    settings = load({}, {})
    assert settings.runtime_dir == "/run/hicache-sidecar"
    assert settings.state_dir == "/var/lib/hicache-sidecar"
    assert settings.http.listen == "127.0.0.1:30080"
    assert settings.faults == []


def test_flags_over_file_over_environment_over_defaults(tmp_path: Path) -> None:
    environ = {
        "RUNTIME_DIRECTORY": "/run/unit:/run/second",
        "STATE_DIRECTORY": "/var/lib/unit",
        "HICACHE_SIDECAR_HTTP": "127.0.0.1:1",
        "HICACHE_SIDECAR_ENGINE_ID": "env",
        "HICACHE_SIDECAR_LEASES_FREEZE_S": "2s",
        "HICACHE_SIDECAR_SOCKET": "/somewhere",  # hicachectl's, not ours
    }
    text = 'engine_id = "file"\n[http]\nlisten = "127.0.0.1:2"\n'
    only_env = load({}, environ)
    assert (only_env.runtime_dir, only_env.state_dir) == ("/run/unit", "/var/lib/unit")
    assert (only_env.http.listen, only_env.engine_id, only_env.leases.freeze_s) == ("127.0.0.1:1", "env", 2.0)
    filed = read(text, tmp_path, environ)
    assert (filed.http.listen, filed.engine_id, filed.leases.freeze_s) == ("127.0.0.1:2", "file", 2.0)
    flagged = read(text, tmp_path, environ, http__listen="127.0.0.1:3", runtime_dir="/run/flag")
    assert (flagged.http.listen, flagged.runtime_dir, flagged.engine_id) == ("127.0.0.1:3", "/run/flag", "file")


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('engine_id = "x"')
    assert load({}, {"HICACHE_SIDECAR_CONFIG": str(tmp_path / "a.toml")}).engine_id == "x"


def test_everything_can_be_set_in_the_file(tmp_path: Path) -> None:
    text = """
    engine_id = "llm"
    on_engine_restart = "leave"
    [http]
    listen = "[::1]:30081"
    allowed_hosts = ["kv.example"]
    [control]
    mode = "0600"
    group = "root"
    [hooks]
    users = ["root"]
    heartbeat_s = "500ms"
    [access.users]
    root = "admin"
    [access.groups]
    root = "viewer"
    [leases]
    prepared_s = "2m"
    [log]
    level = "debug"
    """
    settings = read(text, tmp_path)
    assert (settings.hooks.heartbeat_s, settings.leases.prepared_s) == (0.5, 120.0)
    assert settings.access.groups == {"root": "viewer"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('engine = "x"', ["unknown key engine", "did you mean engine_id?"]),
        ('[http]\nlisten_on = "x"', ["unknown key http.listen_on", "did you mean http.listen?"]),
        ("[htpp]\n", ["unknown key htpp", "did you mean http?"]),
        ("[http]\nlisten = 30080", ["http.listen", "str"]),
        ('[http]\nlisten = "30080"', ["http.listen", "HOST:PORT"]),
        ('[http]\nlisten = "localhost:99999"', ["http.listen"]),
        ('[http]\nlisten = ":30080"', ["names no host"]),
        ('[http]\nlisten = "::1:30080"', ["brackets"]),
        ('[control]\nmode = "rw"', ["control.mode"]),
        ('[access.users]\nbob = "king"', ["access.users"]),
        ("[leases]\nfreeze_s = 0", ["leases.freeze_s"]),
        ('[leases]\nfreeze_s = "soon"', ["leases.freeze_s"]),
        ("[leases]\nfreeze_s = 20", ["in_doubt_s", "longer"]),
        ("[leases]\nfreeze_s = nan", ["leases.freeze_s"]),
        ('on_engine_restart = "maybe"', ["on_engine_restart"]),
        ('runtime_dir = "relative"', ["runtime_dir", "absolute"]),
        ('runtime_dir = "/x"\nstate_dir = "/x"', ["differ"]),
        ("engine_id = ", ["sidecar.toml"]),
        ('http = "x"', ["http"]),
        ('[http]\nallowed_hosts = ["*.example"]', ["http.allowed_hosts"]),
        ('[http]\nallowed_hosts = ["https://kv"]', ["http.allowed_hosts"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_mistakes_in_the_environment_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="HICACHE_SIDECAR_ENGIN_ID is no setting; did you mean HICACHE_SIDECAR_ENGINE_ID"
    ):
        load({}, {"HICACHE_SIDECAR_ENGIN_ID": "x"})
    with pytest.raises(ConfigError, match="HICACHE_SIDECAR_LEASES_FREEZE_S"):
        load({}, {"HICACHE_SIDECAR_LEASES_FREEZE_S": "x"})
    with pytest.raises(ConfigError, match="No such file"):
        load({}, {}, tmp_path / "missing.toml")


def test_lists_and_tables_from_the_environment() -> None:
    environ = {
        "HICACHE_SIDECAR_FAULTS": "loop.block, other",
        "HICACHE_SIDECAR_ACCESS_USERS": "bob=viewer,eve=operator",
        "HICACHE_SIDECAR_HTTP_ALLOWED_HOSTS": "a,b",
    }
    settings = load({}, environ)
    assert settings.faults == ["loop.block", "other"]
    assert settings.access.users == {"bob": "viewer", "eve": "operator"}
    assert settings.http.allowed_hosts == ["a", "b"]


def test_durations_and_addresses() -> None:
    assert [seconds_of(v) for v in ("250ms", "5s", "2m", "1.5h", " 3 s ")] == [0.25, 5.0, 120.0, 5400.0, 3.0]
    assert [seconds_of(v) for v in (5, "5", "x", None)] == [5, "5", "x", None]
    assert split_address("[::1]:1") == ("::1", 1)
    assert split_address("host:0") == ("host", 0)


def test_a_wrong_name_is_answered_with_the_right_ones(tmp_path: Path) -> None:
    """F60: roles, levels and formats are few; the refusal lists them."""
    for text, words in (
        ("[access.users]\nroot = 'king'", "one of admin, operator, viewer"),
        ("[log]\nlevel = 'loud'", "one of debug, error, info, warning"),
        ("on_engine_restart = 'never'", "one of leave, reattach"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(text, tmp_path)


def test_one_directory_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (f"{tmp_path}/x/..", f"{tmp_path}/link", f"{tmp_path}/"):
        with pytest.raises(ConfigError, match="must differ"):
            load({"runtime_dir": str(tmp_path), "state_dir": other}, {})
