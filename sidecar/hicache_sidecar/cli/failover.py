"""``hicachectl failover [show | set BACKEND ACTION | unset BACKEND | release]``."""

import argparse
import json
from typing import Any

from hicache_sidecar.cli import arguments as args
from hicache_sidecar.cli.context import EXIT_DONE, Context, UsageError

ACTIONS = ("none", "bypass", "detach", "spares")
WHAT = ("show", "set", "unset", "release")
MODES = ("auto", *args.MODES)
WATCH = ("reads", "reads_and_writes")
SHOWN_STEPS = 12
_SECONDS = {  # option -> (field, help)
    "--confirm": ("confirm_s", "how long a breaker must be open before anything is done (default 2)"),
    "--min-stay": ("min_stay_s", "nothing goes back earlier (default 30)"),
    "--steady": ("steady_s", "back and well for so long: over (default 60)"),
    "--backoff": ("backoff_s", "first pause between tries; doubles (default 5)"),
    "--backoff-max": ("backoff_max_s", "longest pause (default 600)"),
    "--flap-window": ("flap_window_s", "window of --flap-limit (default 600)"),
    "--wait": ("wait_s", "of one operation, for idle (default 30)"),
    "--timeout": ("timeout_s", "of one operation (default 120)"),
}


def _parser() -> args.Parser:
    made = args.parser(
        "failover",
        "Show or set what happens when a store fails. `set` gives one backend its whole policy and leaves the others; "
        "BACKEND * means any without one of its own.",
    )
    made.add_argument("what", nargs="?", choices=WHAT, default="show")
    made.add_argument("backend", nargs="?", help="file, nixl, ..., or *")
    made.add_argument("action", nargs="?", choices=ACTIONS, help="none, bypass, detach, or spares in their order")
    made.add_argument("--spare", action="append", default=[], metavar="BACKEND[=JSON|@FILE]",
                      help="a target with its config, as in attach --config; repeat for more")  # fmt: skip
    made.add_argument("--reconnect", choices=("on", "off"), help="go back by itself (default: on, but off for spares)")
    made.add_argument("--mode", choices=MODES, help="of the operations (default auto: hot, else drain)")
    made.add_argument("--watch", choices=WATCH, help="reads_and_writes: a store that only refuses writes counts too")
    for option, (_, text) in _SECONDS.items():
        made.add_argument(option, type=args.seconds, metavar="SECONDS", help=text)
    made.add_argument("--flap-limit", type=int, metavar="N", help="most transitions in a window, then hold (default 6)")
    made.add_argument(
        "--policies", metavar="JSON|@FILE", help="set: all policies by backend, instead of BACKEND ACTION"
    )
    made.add_argument("--reason", default="", metavar="TEXT")
    return made


def run_failover(context: Context, arguments: list[str]) -> int:
    """Show, set, unset or release; prints where the failover stands."""
    options = args.parse(context, _parser(), arguments)
    if options.what == "show":
        body: dict[str, Any] = {"type": "failover"}
    else:
        body = {"type": "set_failover", "reason": options.reason, **_change(options)}
    document = context.ask(body)
    if context.json:
        context.document(document)
    else:
        _print(context, document)
    return EXIT_DONE


def _change(options: argparse.Namespace) -> dict[str, Any]:
    if options.what == "release":
        return {"release": True}
    if options.what == "set" and options.policies is not None:
        if options.backend is not None:
            raise UsageError("failover: --policies takes the place of BACKEND ACTION")
        return {"policies": _document(options.policies)}
    if options.backend is None:
        raise UsageError(f"failover: {options.what} needs a BACKEND")
    if options.what == "unset":
        return {"policies": {options.backend: None}, "keep_others": True}
    if options.action is None:
        raise UsageError("failover: set BACKEND needs an action: " + ", ".join(ACTIONS))
    return {"policies": {options.backend: _policy(options)}, "keep_others": True}


def _policy(options: argparse.Namespace) -> dict[str, Any]:
    policy: dict[str, Any] = {"action": options.action}
    if options.spare:
        policy["spares"] = [_spare(text) for text in options.spare]
    if options.reconnect is not None:
        policy["reconnect"] = options.reconnect == "on"
    for name in ("mode", "watch", "flap_limit"):
        if getattr(options, name) is not None:
            policy[name] = getattr(options, name)
    for option, (field, _) in _SECONDS.items():
        value = getattr(options, option[2:].replace("-", "_"))
        if value is not None:
            policy[field] = value
    return policy


def _spare(text: str) -> dict[str, Any]:
    """``file={"file_storage_path": "/srv"}``: the config is not judged here, and never echoed (F94)."""
    backend, equals, config = text.partition("=")
    if not backend:
        raise UsageError("failover: --spare BACKEND[=JSON|@FILE]")
    made: dict[str, Any] = {"hicache_storage_backend": backend}
    if equals:
        made["hicache_storage_backend_extra_config_json"] = args.config_text(config)
    return made


def _document(text: str) -> dict[str, Any]:
    try:
        policies = json.loads(args.config_text(text) or "")
    except ValueError as error:
        raise UsageError("failover: --policies is no JSON") from error
    if not isinstance(policies, dict):
        raise UsageError('failover: --policies is an object by backend: {"file": {"action": "bypass"}}')
    return policies


def _print(context: Context, document: dict[str, Any]) -> None:
    pairs: list[tuple[str, Any]] = [("state", document.get("state"))]
    for name, field in (("because", "reason"), ("backend", "backend"), ("attempts", "attempts")):
        if document.get(field):
            pairs.append((name, document[field]))
    home = document.get("home")
    if home:
        pairs.append(("left", home.get("hicache_storage_backend")))
    if document.get("next_try_in_s") is not None:
        pairs.append(("next try in", f"{document['next_try_in_s']:.1f} s"))
    context.pairs(pairs)
    policies = document.get("policies") or {}
    if policies:
        context.line()
        rows = []
        for name, policy in sorted(policies.items()):
            spares = [spare.get("hicache_storage_backend") for spare in policy.get("spares") or []]
            back = policy.get("reconnect")
            rows.append((name, policy.get("action"), spares, "default" if back is None else back, policy.get("mode"),
                         policy.get("confirm_s"), policy.get("min_stay_s"), policy.get("flap_limit")))  # fmt: skip
        context.table(
            ("BACKEND", "ACTION", "SPARES", "RECONNECT", "MODE", "CONFIRM_S", "MIN_STAY_S", "FLAP_LIMIT"), rows
        )
    else:
        context.line("no policies: a store that fails stays attached, and its guard turns it into misses")
    steps = (document.get("steps") or [])[-SHOWN_STEPS:]
    if steps:
        context.line()
        context.table(
            ("AT", "STEP", "BACKEND", "TO", "REASON"),
            [(s.get("at"), s.get("step"), s.get("backend"), s.get("to"), s.get("reason")) for s in steps],
        )
    for warning in document.get("warnings") or []:
        context.note(f"warning: {warning}")
