"""Wrong command lines, and configs that are read from elsewhere."""

from pathlib import Path
from typing import Any

import pytest


def test_config_comes_from_a_file_stdin_or_the_engine_host(
    ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    file = tmp_path / "options.json"
    file.write_text('{"file_storage_path": "/srv"}\n')  # an editor's last newline

    def sent(value: str) -> str | None:
        return ctl("attach", "file", "--config", value).bodies[0].hicache_storage_backend_extra_config_json

    assert sent(f"@{file}") == '{"file_storage_path": "/srv"}'
    assert sent("@@/etc/hicache/x.json") == "@/etc/hicache/x.json"
    monkeypatch.setattr("sys.stdin", io.StringIO('{"b": 2}'))
    assert sent("@-") == '{"b": 2}'


def test_a_config_file_that_cannot_be_sent_is_a_usage_error_without_its_content(ctl: Any, tmp_path: Path) -> None:
    """F94: a parse error must not echo the config, which may hold secrets."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfepassword")
    huge = tmp_path / "huge"
    huge.write_text("s3cret" * 200_000)
    for name in (binary, huge, tmp_path / "absent", tmp_path):
        ran = ctl("attach", "file", "--config", f"@{name}")
        assert (ran.code, ran.bodies) == (2, [])
        assert "s3cret" not in ran.err
        assert "password" not in ran.err


@pytest.mark.parametrize(
    "argv",
    [
        [], ["nothing"], ["--nothing"], ["attach"], ["attach", "file", "--mode", "now"], ["bypass", "maybe"],
        ["-o", "xml", "status"], ["-o"], ["rollback", "x"], ["policy"], ["policy", "--write-policy", "never"],
        ["attach", "file", "--wait", "nan"], ["attach", "file", "--wait", "-1"], ["detach", "--timeout", "1e400"],
        ["policy", "--prefetch-timeout-base", "inf"], ["status", "extra"], ["completion", "csh"],
    ],
)  # fmt: skip
def test_usage_errors_exit_2_and_send_nothing(ctl: Any, argv: list[str]) -> None:
    """F53: numbers that are none are refused before anything is sent."""
    ran = ctl(*argv)
    assert (ran.code, ran.bodies, ran.out) == (2, [], "")
    assert "hicachectl" in ran.err


def test_a_usage_error_has_a_document_too(ctl: Any) -> None:
    ran = ctl("attach", "-o", "json")
    assert (ran.code, ran.json["error"]["code"]) == (2, "usage")
