"""Jobs and their past: operations, cancel, history, rollback, watch."""

from typing import Any

from hicache_sidecar.cli import arguments as args
from hicache_sidecar.cli.changes import print_answer
from hicache_sidecar.cli.context import EXIT_DEADLINE, EXIT_DONE, EXIT_FAILED, Context, blockers
from hicache_sidecar.cli.streams import plain


def run_operations(context: Context, arguments: list[str]) -> int:
    """List operations, or show one."""
    made = args.parser("operations", "List operations, or show one.")
    made.add_argument("id", nargs="?")
    options = args.parse(context, made, arguments)
    body: dict[str, Any] = {"type": "operations"}
    if options.id is not None:
        body["operation_id"] = options.id
    answer = context.ask(body)
    if context.json:
        context.document(answer)
    elif options.id is not None:
        _print_operation(context, answer)
    else:
        context.table(
            ("ID", "KIND", "PHASE", "DONE", "STARTED", "ELAPSED_MS", "ACTOR"),
            [
                (o["id"], o["kind"], o["phase"], o["done"], o["started_at"], o["elapsed_ms"], o.get("actor"))
                for o in answer.get("operations") or []
            ],
        )
    return EXIT_DONE


def run_cancel(context: Context, arguments: list[str]) -> int:
    """Cancel an operation; 1 when it was done before, 4 when it is not over yet."""
    made = args.parser(
        "cancel", "Cancel an operation; the old state is restored. Exit code 1 when it was done before, 4 when its end "
        "is still to come."
    )  # fmt: skip
    made.add_argument("id")
    options = args.parse(context, made, arguments)
    answer = context.ask({"type": "cancel", "operation_id": options.id})
    if context.json:
        context.document(answer)
    elif "success" in answer:
        return print_answer(context, answer)
    elif not context.quiet:
        _print_operation(context, answer)
    if answer.get("done") is False:
        context.note(f"{options.id} is not over yet: hicachectl operations {options.id}")
        return EXIT_DEADLINE
    if answer.get("done") and not answer.get("error"):
        context.note(f"{options.id} was done before it could be cancelled; `hicachectl rollback` goes back")
        return EXIT_FAILED
    return EXIT_DONE


def _print_operation(context: Context, operation: dict[str, Any]) -> None:
    target = operation.get("target") or {}
    pairs: list[tuple[str, Any]] = [
        (name, operation.get(name))
        for name in ("id", "kind", "phase", "done", "started_at", "elapsed_ms", "actor", "reason")
    ]
    if target:
        pairs.append(("target", target.get("hicache_storage_backend") or "detached"))
    if operation.get("blocked_by"):
        pairs.append(("blocked by", blockers(operation["blocked_by"])))
    error = operation.get("error")
    if error:
        pairs.append(("error", f"{error.get('message')} [{error.get('code')}]"))
    answer = operation.get("answer")
    if answer:
        pairs.append(("answer", answer.get("message")))
    context.pairs(pairs)
    ranks = operation.get("ranks") or []
    if ranks:
        context.line()
        context.table(("RANK", "OK", "MESSAGE"), [(r["rank"], r["success"], r.get("message")) for r in ranks])


def run_history(context: Context, arguments: list[str]) -> int:
    """List revisions."""
    args.parse(context, args.parser("history", "Revisions: who, when, why, what."), arguments)
    answer = context.ask({"type": "history"})
    if context.json:
        context.document(answer)
        return EXIT_DONE
    context.table(
        ("REV", "AT", "KIND", "RESULT", "BACKEND", "PREFETCH", "WRITE", "ACTOR", "MS", "REASON"),
        [
            (r["revision"], r["at"], r["kind"], r["result"], (r.get("target") or {}).get("hicache_storage_backend"),
             (r.get("target") or {}).get("hicache_storage_prefetch_policy"),
             (r.get("target") or {}).get("hicache_write_policy"), r.get("actor"), r.get("duration_ms"), r.get("reason"))
            for r in answer.get("revisions") or []
        ],
    )  # fmt: skip
    return EXIT_DONE


def run_rollback(context: Context, arguments: list[str]) -> int:
    """Go back to a revision's state."""
    made = args.parser("rollback", "Go back to the state of a revision; an ordinary operation with a new revision.")
    made.add_argument("revision", type=int)
    args.add_change(made)
    options = args.parse(context, made, arguments)
    body = {"type": "rollback", "revision": options.revision, **args.change_fields(options)}
    return print_answer(context, context.ask(body, args.budget_s(options)))


def run_watch(context: Context, arguments: list[str]) -> int:
    """Print events until interrupted, or ``--count`` of them; JSON is one document per line."""
    import sys

    import msgspec

    made = args.parser("watch", "Print events as they happen: a snapshot first, then numbered changes.")
    made.add_argument("--after", type=int, metavar="ID", help="resume after this event")
    made.add_argument("--count", type=args.positive, metavar="N", help="leave after N events")
    options = args.parse(context, made, arguments)
    left = options.count
    with context.connect() as connection:
        for event in connection.stream({"type": "watch", "last_event_id": options.after}):
            if context.json:
                print(msgspec.json.encode(event).decode())
            else:
                data = event.get("data") or {}
                facts = {k: v for k, v in data.items() if v not in (None, "") and not isinstance(v, dict | list)}
                shown = plain(" ".join(f"{key}={value}" for key, value in facts.items()))
                context.line(f"{event.get('id')}  {event.get('at')}  {event.get('kind')}  {shown}".rstrip())
            sys.stdout.flush()
            left = None if left is None else left - 1
            if left is not None and left <= 0:
                break
    return EXIT_DONE
