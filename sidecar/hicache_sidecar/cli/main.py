"""Entry point of hicachectl. It imports nothing, so that Ctrl-C while the rest is loaded is no traceback either."""

import sys

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count; context.py has the same


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; prints, never raises for what a user can do wrong."""
    try:
        from hicache_sidecar.cli.run import main as run
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return run(argv)


def entry() -> None:
    """Console script."""
    try:
        code = main()
    except KeyboardInterrupt:  # a second one, while the first was being handled
        code = EXIT_INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    entry()
