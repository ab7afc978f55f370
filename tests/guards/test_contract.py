"""The outside contract, written out: error codes, exit codes, levels of access, file names."""

import re

import pytest
from tests.guards.sources import ROOT

from hicache_proto import api, errors, framing, model
from hicache_sidecar.cli import context
from hicache_sidecar.client import errors as client_errors
from hicache_sidecar.core.actor import LEVELS, Role

# interface.md, "Error": code -> (HTTP status, exit code of hicachectl).
TABLE = {
    "not_idle": (400, 3),
    "unauthenticated": (401, 8),
    "forbidden": (403, 8),
    "not_found": (404, 1),
    "method_not_allowed": (405, 1),  # added: a code has one status, and this was invalid_request with another
    "already_attached": (409, 7),
    "operation_in_progress": (409, 7),
    "quarantined": (409, 7),
    "revision_mismatch": (412, 7),
    "too_large": (413, 1),
    "invalid_request": (422, 1),
    "invalid_config": (422, 1),
    "unknown_backend": (422, 1),
    "backend_unavailable": (422, 1),
    "layout_unsupported": (422, 1),
    "unsupported_by_engine": (422, 1),
    "internal": (500, 1),
    "inconsistent": (500, 1),
    "prepare_failed": (502, 9),
    "rolled_back": (502, 9),
    "no_engine": (503, 6),
    "deadline_exceeded": (504, 4),
}


def test_every_error_code_has_its_status_and_exit_code() -> None:
    assert {code: (cls.status, cls.exit_code) for code, cls in errors.ERRORS.items()} == TABLE


def test_every_error_class_is_registered_once() -> None:
    classes = set(errors.HicacheError.__subclasses__())
    ours = {cls for cls in classes if cls.__module__ == "hicache_proto.errors"}
    assert set(errors.ERRORS.values()) == ours
    assert len({cls.code for cls in ours}) == len(ours)


def test_only_refusals_that_pass_by_themselves_are_retryable() -> None:
    """F6: clients treated a permanent refusal as transient and never ended."""
    retryable = {code for code, cls in errors.ERRORS.items() if cls.retryable}
    assert retryable == {"not_idle", "operation_in_progress", "no_engine", "deadline_exceeded"}


def test_exit_codes_of_the_client_itself() -> None:
    """2 and 5 belong to the client alone; none of its codes is also a code of the table."""
    assert (context.EXIT_DONE, context.EXIT_USAGE) == (0, 2)
    assert client_errors.Unreachable("x").exit_code == client_errors.ConnectionLost("x").exit_code == 5
    assert {0, 2, 5}.isdisjoint(exit_code for _, exit_code in TABLE.values())
    assert {client_errors.Unreachable.code, client_errors.ConnectionLost.code}.isdisjoint(TABLE)


def requests() -> list[type]:
    return list(api.ApiRequest.__args__)


def test_every_request_has_a_declared_level() -> None:
    """F97: an internal API was found to be open because nobody had declared who may use it."""
    assert set(LEVELS) == set(requests())
    assert Role.NONE not in LEVELS.values()


def test_levels_are_those_of_the_contract() -> None:
    """interface.md: viewer = status, idle, ranks, history, events; admin = clear (dynamic, force: by content)."""
    tags = {str(cls.__struct_config__.tag): level for cls, level in LEVELS.items()}
    assert {tag for tag, level in tags.items() if level is Role.ADMIN} == {"clear"}
    assert {tag for tag, level in tags.items() if level is Role.VIEWER} == {
        "status", "idle", "ranks", "history", "watch", "backends", "operations", "failover",
    }  # fmt: skip


@pytest.mark.parametrize("cls", requests(), ids=lambda cls: cls.__name__)
def test_every_request_refuses_unknown_fields(cls: type) -> None:
    assert cls.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]


def test_limits_and_names_of_the_contract() -> None:
    assert (framing.MAX_FRAME_BYTES, framing.MAX_DEPTH) == (1 << 20, 32)
    assert [state.value for state in model.State] == [
        "detached", "attaching", "attached", "bypassed", "draining", "detaching", "quarantined", "split", "engine_down",
    ]  # fmt: skip
    assert len(model.MANDATORY_COUNTERS) == len(set(model.MANDATORY_COUNTERS))
    assert {*model.QUEUE_COUNTERS, *model.RUNNING_COUNTERS} <= set(model.MANDATORY_COUNTERS)


def test_the_readme_shows_every_command_and_no_other() -> None:
    from hicache_sidecar.cli.commands import COMMANDS

    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"hicachectl (?:-q |-o json |--socket \S+ )*([a-z]+)\b", text))
    assert set(COMMANDS) - shown == set()
    assert shown - set(COMMANDS) == set()


def test_the_readme_lists_every_setting_and_no_other() -> None:
    """A key that is not documented might as well not exist; one that does not exist is an error at start."""
    import msgspec

    from hicache_sidecar.daemon.settings import Settings

    keys = set()
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= {f"{field.name}.{inner.name}" for inner in msgspec.structs.fields(field.type)}
        else:
            keys.add(field.name)
    section = (ROOT / "README.md").read_text().split("## Configuration")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for cell in first_cells for key in re.findall(r"`([^`]+)`", cell)} == keys


def test_the_readmes_transcript_is_of_this_demo() -> None:
    """Every step of the demo, in order, and the end: a transcript of an older demo fails here."""
    demo = (ROOT / "sidecar/hicache_sidecar/cli/demo.py").read_text()
    titles = re.findall(r'show\.step\("([^"]+)"\)', demo)
    assert len(titles) >= 9
    text = (ROOT / "README.md").read_text()
    transcript = text.split("<!-- demo:begin -->")[1].split("<!-- demo:end -->")[0]
    shown = re.findall(r"^== \d+\. (.+)$", transcript, re.MULTILINE)
    assert shown == titles
    assert "checks held" in transcript


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?<![\w/-])(?:systemd|tests|proto|sidecar|engine_hooks)/[\w./@-]*\w", text))
    assert len(named) > 5
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing
