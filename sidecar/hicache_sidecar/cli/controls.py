"""Switches around the attached backend: clear, bypass, resolve, drain, resume."""

from hicache_sidecar.cli import arguments as args
from hicache_sidecar.cli.changes import print_answer
from hicache_sidecar.cli.context import EXIT_DEADLINE, EXIT_DONE, Context, UsageError
from hicache_sidecar.client.connection import GRACE_S

DRAIN_TIMEOUT_S, DRAIN_HOLD_S = 30.0, 300.0  # interface.md's defaults


def run_clear(context: Context, arguments: list[str]) -> int:
    """Delete one namespace's pages; the namespace must be named."""
    made = args.parser("clear", "Delete this namespace's pages from the attached store, nothing else (role admin).")
    made.add_argument("--confirm", metavar="NAMESPACE", help="the namespace to delete; left out, it is only shown")
    made.add_argument("--timeout", type=args.seconds, default=args.DEFAULT_TIMEOUT_S, metavar="SECONDS")
    options = args.parse(context, made, arguments)
    if options.confirm is None:
        status = context.ask({"type": "status"})
        names = sorted({r["namespace"] for r in status.get("ranks") or [] if r.get("namespace")})
        if not names:
            raise UsageError("clear: no namespace to clear: nothing is attached")
        raise UsageError("clear deletes pages for good; repeat with " + " or ".join(f"--confirm {n}" for n in names))
    body = {"type": "clear", "confirm": options.confirm, "timeout_s": options.timeout}
    return print_answer(context, context.ask(body, options.timeout + GRACE_S))


def run_bypass(context: Context, arguments: list[str]) -> int:
    """Turn the guard's bypass on or off."""
    made = args.parser("bypass", "While on, reads miss and writes are skipped; works at any moment, under load.")
    made.add_argument("switch", choices=("on", "off"))
    options = args.parse(context, made, arguments)
    return print_answer(context, context.ask({"type": "bypass", "enabled": options.switch == "on"}))


def run_resolve(context: Context, arguments: list[str]) -> int:
    """Settle drift."""
    made = args.parser("resolve", "After drift: take what the ranks have as desired, or bring them back.")
    made.add_argument("how", choices=("adopt", "reapply"))
    made.add_argument("--reason", default="", metavar="TEXT")
    made.add_argument("--timeout", type=args.seconds, default=args.DEFAULT_TIMEOUT_S, metavar="SECONDS")
    options = args.parse(context, made, arguments)
    body = {"type": "resolve", "how": options.how, "reason": options.reason, "timeout_s": options.timeout}
    return print_answer(context, context.ask(body, options.timeout + GRACE_S))


def run_drain(context: Context, arguments: list[str]) -> int:
    """Close admission and wait; 4 when it is still draining."""
    made = args.parser("drain", "Close admission and wait for idle; it reopens by itself after --hold.")
    made.add_argument(
        "--timeout", type=args.seconds, default=DRAIN_TIMEOUT_S, metavar="SECONDS", help="how long to wait for idle"
    )
    made.add_argument(
        "--hold", type=args.seconds, default=DRAIN_HOLD_S, metavar="SECONDS", help="when it reopens by itself"
    )
    made.add_argument("--reason", default="", metavar="TEXT")
    options = args.parse(context, made, arguments)
    body = {"type": "drain", "timeout_s": options.timeout, "hold_s": options.hold, "reason": options.reason}
    answer = context.ask(body, options.timeout + GRACE_S)
    code = print_answer(context, answer)
    return EXIT_DEADLINE if code != EXIT_DONE and answer.get("state") == "draining" else code


def run_resume(context: Context, arguments: list[str]) -> int:
    """Open admission."""
    args.parse(context, args.parser("resume", "Open admission again."), arguments)
    return print_answer(context, context.ask({"type": "resume"}))
