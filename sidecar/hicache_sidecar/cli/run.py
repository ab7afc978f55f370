"""What hicachectl does: global options, the command's module, errors to exit codes.

The parser of a command is built when that command is chosen, so that ``status`` starts in little more than the time
that importing msgspec takes (measured by tests/bench/bench_cli.py).
"""

import sys
from contextlib import suppress

from hicache_proto.errors import HicacheError
from hicache_sidecar.cli.context import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    PROGRAM,
    Context,
    UsageError,
)
from hicache_sidecar.cli.streams import abandon, prepare
from hicache_sidecar.client.errors import ClientError

USAGE = f"usage: {PROGRAM} [--socket PATH] [-o table|json] [-q] COMMAND ..."


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; prints, never raises for what a user can do wrong."""
    prepare()
    try:
        return _outcome(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `hicachectl history | head`: the reader left, which is no failure of ours
        return EXIT_FAILED
    except OSError as error:  # a full disk behind stdout
        with suppress(OSError):
            print(f"{PROGRAM}: cannot print the answer: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        abandon()


def _outcome(arguments: list[str]) -> int:
    context = Context()
    try:
        return _run(context, arguments)
    except UsageError as error:
        if context.json:
            context.document({"error": {"code": "usage", "message": str(error), "retryable": False, "hint": "",
                                        "operation_id": None, "details": {}}})  # fmt: skip
        context.note(f"{PROGRAM}: {error}" + (f"\n{error.usage}" if error.usage else ""))
        return EXIT_USAGE
    except (HicacheError, ClientError) as error:
        return context.failure(error)
    except SystemExit as leave:  # a command's --help
        return int(leave.code or 0)


def _run(context: Context, arguments: list[str]) -> int:
    rest = _global_options(context, arguments)
    if rest is None:
        return EXIT_DONE
    if not rest:
        raise UsageError("no command given", f"{USAGE}\nsee {PROGRAM} --help")
    name, *arguments = rest
    from hicache_sidecar.cli.commands import COMMANDS

    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"no command {name!r}; see {PROGRAM} --help")
    code = command.load(name)(context, arguments)
    sys.stdout.flush()  # so that a reader that left is seen here
    return code


def _global_options(context: Context, arguments: list[str]) -> list[str] | None:
    """Take the options before the command; None when help or the version was printed."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option, _, inline = rest.pop(0).partition("=")
        if option in ("-h", "--help"):
            _print_help()
            return None
        if option == "--version":
            from hicache_proto import __version__

            print(f"{PROGRAM} {__version__}")
            return None
        if option in ("-q", "--quiet"):
            context.quiet = True
        elif option in ("-o", "--output", "--socket", "-ojson", "-otable"):
            value = option[2:] if option.startswith("-o") and len(option) > 2 else inline
            if not value:
                if not rest:
                    raise UsageError(f"{option} needs a value")
                value = rest.pop(0)
            if option == "--socket":
                context.socket = value
            elif value in ("table", "json"):
                context.json = value == "json"
            else:
                raise UsageError(f"-o takes table or json, not {value!r}")
        else:
            raise UsageError(f"unknown option {option}", USAGE)
    return rest


def _print_help() -> None:
    from hicache_sidecar.cli.commands import COMMANDS

    print(USAGE)
    print("\nAttach, detach and swap the KV-cache storage behind a running LLM engine.\n\ncommands:")
    for name, command in COMMANDS.items():
        print(f"  {name:<11} {command.summary}")
    print(
        "\noptions:\n"
        "  --socket PATH    the sidecar's control.sock (else $HICACHE_SIDECAR_SOCKET, else the packaged path)\n"
        "  -o table|json    json prints the HTTP API's document on stdout, errors too\n"
        "  -q               no progress, no sentence of success\n"
        "  --version        print the version\n"
        f"\n{PROGRAM} COMMAND --help describes one command. Exit codes: 0 done or already so, 1 refused or failed,\n"
        "2 usage, 3 not idle, 4 deadline, 5 sidecar not reachable or connection lost, 6 no engine or ranks missing,\n"
        "7 conflict, 8 not permitted, 9 failed and every rank as before."
    )
