"""``hicache-sidecar``: command line, configuration, then the trio loop. Exit codes: 0 stopped, 1 failed, 2 usage."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hicache_proto import __version__, extras
from hicache_proto.errors import HicacheError
from hicache_sidecar.daemon import config
from hicache_sidecar.daemon.settings import Settings
from hicache_sidecar.obs import logging as obs_logging

log = logging.getLogger("hicache.daemon")

EXIT_FAILED = 1
EXIT_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """The command line; every setting beyond these is in the file or the environment."""
    made = argparse.ArgumentParser(
        prog="hicache-sidecar", description="Attach, detach and swap the L3 storage behind a running LLM engine."
    )
    made.add_argument("--config", metavar="FILE.toml", type=Path, help="settings (default: $HICACHE_SIDECAR_CONFIG)")
    made.add_argument("--runtime-dir", metavar="DIR", help="control.sock and hooks.sock (default: $RUNTIME_DIRECTORY)")
    made.add_argument("--state-dir", metavar="DIR", help="the journal (default: $STATE_DIRECTORY)")
    made.add_argument("--http", metavar="HOST:PORT", help="HTTP admin API; '' turns it off (default 127.0.0.1:30080)")
    made.add_argument("--check", action="store_true", help="check the configuration and exit")
    made.add_argument(
        "--recover", action="store_true", help="start over a damaged journal, keeping it beside the new one"
    )
    made.add_argument("--version", action="version", version=f"hicache-sidecar {__version__}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; returns the exit code."""
    options = parser().parse_args(argv)
    if absent := extras.missing(extras.SIDECAR):
        print(f"hicache-sidecar {extras.advice(absent, 'sidecar')}", file=sys.stderr)
        return EXIT_FAILED
    from hicache_sidecar.daemon import faults

    def read() -> Settings:
        flags = {"runtime_dir": options.runtime_dir, "state_dir": options.state_dir, "http.listen": options.http}
        settings = config.load(flags, os.environ, options.config)
        try:
            faults.plan(settings.faults)
        except ValueError as exc:
            raise config.ConfigError(f"faults: unknown fault point or action: {exc}") from None
        return settings

    try:
        settings = read()
        if options.check:
            return _check(settings)
    except config.ConfigError as exc:
        print(f"hicache-sidecar: {exc}", file=sys.stderr)
        return EXIT_USAGE
    obs_logging.setup(settings.log.level, settings.log.format)

    # Imported when needed: --check and usage errors answer without loading trio, ZMQ and the HTTP stack.
    from hicache_sidecar.daemon.start import start

    return start(settings, read, recover=options.recover)


def _check(settings: Settings) -> int:
    """What needs more than the file: users, groups and token files exist, and the address may be served."""
    from hicache_sidecar.daemon.live import check
    from hicache_sidecar.server.auth import TokenError

    try:
        check(settings)
    except TokenError as exc:
        raise config.ConfigError(str(exc)) from None
    print("hicache-sidecar: the configuration is good")
    return 0


def entry() -> None:
    """Console script."""
    try:
        sys.exit(main())
    except HicacheError as exc:  # a start-up error that nobody named more closely
        print(f"hicache-sidecar: {exc.message}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    entry()
