"""Parsers of the commands, and the pieces that several share: changes, config, policies, knobs."""

import argparse
import sys
from typing import Any, NoReturn

from hicache_sidecar.cli.context import PROGRAM, Context, UsageError
from hicache_sidecar.client.connection import GRACE_S

MODES = ("strict", "drain", "hot")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
DEFAULT_TIMEOUT_S = 120.0  # the whole operation; interface.md's default
DEFAULT_DRAIN_WAIT_S = 30.0
MAX_CONFIG_BYTES = 1 << 20  # the frame limit: nothing longer can be sent


class _Formatter(argparse.HelpFormatter):
    """A fixed width: asking for the terminal's loads shutil (5 ms) at the first add_argument, not only for help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=110)


class Parser(argparse.ArgumentParser):
    """A parser whose errors go through ``main``, so that ``-o json`` has a document for them too."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{self.prog.split()[-1]}: {message}", self.format_usage().rstrip())


def parser(name: str, summary: str) -> Parser:
    """A command's parser; the global options are also taken after the command's name."""
    made = Parser(prog=f"{PROGRAM} {name}", description=summary, allow_abbrev=False, formatter_class=_Formatter)
    made.add_argument("-o", dest="output", choices=("table", "json"), help=argparse.SUPPRESS)
    made.add_argument("-q", dest="quiet", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--socket", dest="socket", help=argparse.SUPPRESS)
    return made


def parse(context: Context, made: Parser, arguments: list[str]) -> argparse.Namespace:
    """Parse, and put the global options where they belong.

    Raises:
        UsageError: the command line is wrong. SystemExit(0): help was printed.
    """
    if "json" in arguments and "-o" in arguments:  # before parsing: a usage error must be JSON already
        context.json = arguments[arguments.index("-o") + 1 : arguments.index("-o") + 2] == ["json"]
    options = made.parse_args(arguments)
    if options.output is not None:
        context.json = options.output == "json"
    context.quiet = context.quiet or options.quiet
    context.socket = options.socket or context.socket
    return options


def add_change(made: Parser) -> None:
    """Options of every change."""
    made.add_argument("--mode", choices=MODES, default="strict", help="how to meet running work (default: strict)")
    made.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help="how long to wait for idle")
    made.add_argument("--timeout", type=seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS",
                      help="the whole operation (default: 120)")  # fmt: skip
    made.add_argument("--if-revision", type=int, metavar="N", help="only if the present revision is N")
    made.add_argument("--request-id", metavar="ID", help="idempotency key: a repeat gets the first answer")
    made.add_argument("--reason", default="", metavar="TEXT", help="goes to the history")


def add_checkpoint(made: Parser) -> None:
    """Of swap and detach."""
    made.add_argument("--checkpoint", action="store_true",
                      help="first store L1 and L2 in the store that stays; if that fails nothing changes")  # fmt: skip


def change_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Request fields of ``add_change``."""
    return {
        "mode": options.mode,
        "wait_timeout_s": options.wait,
        "timeout_s": options.timeout,
        "if_revision": options.if_revision,
        "request_id": options.request_id,
        "reason": options.reason,
    }


def budget_s(options: argparse.Namespace) -> float:
    """How long the client waits: the sidecar's own deadline answers first."""
    return float(options.timeout + options.wait + DEFAULT_DRAIN_WAIT_S + GRACE_S)


def add_policies(made: Parser) -> None:
    """The two policies."""
    made.add_argument("--prefetch-policy", choices=PREFETCH_POLICIES, metavar="P", help=", ".join(PREFETCH_POLICIES))
    made.add_argument("--write-policy", choices=WRITE_POLICIES, metavar="P", help=", ".join(WRITE_POLICIES))


def policy_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Request fields of ``add_policies``."""
    return {
        "hicache_storage_prefetch_policy": options.prefetch_policy,
        "hicache_write_policy": options.write_policy,
    }


def add_config(made: Parser) -> None:
    """The extra config."""
    made.add_argument(
        "--config",
        metavar="JSON|@FILE",
        help="backend options and prefetch knobs: JSON; @FILE reads a JSON file here, @- stdin; "
        "@@/path names a file on the engine's host (json, toml or yaml below its HICACHE_CONFIG_DIRS)",
    )


def config_text(value: str | None) -> str | None:
    """The extra config string to send. Its content is not judged here, and never echoed (F94).

    Raises:
        UsageError: the file cannot be read, is no text, or is over 1 MiB.
    """
    if value is None or not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    name = value[1:]
    try:
        if name == "-":
            text = sys.stdin.read(MAX_CONFIG_BYTES + 1)
        else:
            with open(name, encoding="utf-8") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"--config @{name}: not UTF-8 text") from error
    except OSError as error:
        raise UsageError(f"--config @{name}: {error.strerror or error}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"--config @{name}: over {MAX_CONFIG_BYTES} bytes")
    return text.strip()  # a file's last newline is no part of the config, and would stand in every status


def add_knobs(made: Parser) -> None:
    """The prefetch knobs, by their SGLang names."""
    made.add_argument("--prefetch-threshold", type=int, metavar="TOKENS", help="shorter hits are not fetched")
    made.add_argument("--prefetch-timeout-base", type=seconds, metavar="SECONDS", help="fixed part of the budget")
    made.add_argument("--prefetch-timeout-per-ki-token", type=seconds, metavar="SECONDS", help="per 1024 tokens")
    made.add_argument("--prefetch-timeout-max", type=_seconds_or_none, metavar="SECONDS|none", help="upper bound")
    made.add_argument("--hicache-storage-pass-prefix-keys", type=_switch, metavar="true|false",
                      help="hand the preceding page hashes to the backend")  # fmt: skip


KNOBS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
    "hicache_storage_pass_prefix_keys",
)
_NONE = object()  # `--prefetch-timeout-max none` is a value; a flag that was not given is None


def knob_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The knobs that were given."""
    given = {name: getattr(options, name) for name in KNOBS if getattr(options, name) is not None}
    return {name: None if value is _NONE else value for name, value in given.items()}


def seconds(text: str) -> float:
    """A finite, non-negative number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:  # false for NaN as well (F53)
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def positive(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 62):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _seconds_or_none(text: str) -> Any:
    return _NONE if text.lower() == "none" else seconds(text)


def _switch(text: str) -> bool:
    if text.lower() in ("true", "on", "yes", "1"):
        return True
    if text.lower() in ("false", "off", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
