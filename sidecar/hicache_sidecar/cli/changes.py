"""Commands that move the ranks to another state: attach, swap, check, detach, policy."""

from argparse import Namespace
from typing import Any

from hicache_sidecar.cli import arguments as args
from hicache_sidecar.cli.context import EXIT_DONE, EXIT_FAILED, Context, UsageError
from hicache_sidecar.cli.streams import plain


def run_attach(context: Context, arguments: list[str]) -> int:
    """Attach; already so is success."""
    return _attach(context, "attach", "Attach a storage backend to the running engine.", arguments)


def run_swap(context: Context, arguments: list[str]) -> int:
    """Replace what is attached in one operation."""
    return _attach(context, "swap", "Replace the attached backend in one operation.", arguments, swap=True)


def run_check(context: Context, arguments: list[str]) -> int:
    """Dry run: validate and prepare on every rank, then throw it away."""
    summary = "Validate and prepare on every rank, then throw it away; says what would change."
    return _attach(context, "check", summary, arguments, swap=True, dry_run=True)


def _attach(context: Context, name: str, summary: str, arguments: list[str], **fields: bool) -> int:
    made = args.parser(name, summary)
    made.add_argument("backend", help="file, nixl, mooncake, ...; `hicachectl backends` lists them")
    args.add_config(made)
    args.add_policies(made)
    args.add_change(made)
    if name == "swap":
        args.add_checkpoint(made)
    if name != "check":
        made.add_argument("--force", action="store_true", help="attach a quarantined config (role admin)")
    options = args.parse(context, made, arguments)
    body: dict[str, Any] = {
        "type": "attach",
        "hicache_storage_backend": options.backend,
        "hicache_storage_backend_extra_config_json": args.config_text(options.config),
        **args.policy_fields(options),
        **args.change_fields(options),
        **fields,
    }
    if name != "check" and options.force:
        body["force"] = True
    if name == "swap" and options.checkpoint:
        body["checkpoint"] = True
    return _change(context, body, options)


def run_detach(context: Context, arguments: list[str]) -> int:
    """Detach; idempotent."""
    made = args.parser("detach", "Stop using the storage backend. What the store holds stays.")
    args.add_change(made)
    args.add_checkpoint(made)
    options = args.parse(context, made, arguments)
    body = {"type": "detach", **args.change_fields(options)}
    if options.checkpoint:
        body["checkpoint"] = True
    return _change(context, body, options)


def run_policy(context: Context, arguments: list[str]) -> int:
    """Change live keys."""
    made = args.parser("policy", "Change policies and prefetch knobs of what is attached; nothing is rebuilt.")
    args.add_policies(made)
    args.add_knobs(made)
    args.add_change(made)
    options = args.parse(context, made, arguments)
    policies, knobs = args.policy_fields(options), args.knob_fields(options)
    if not knobs and not any(policies.values()):
        raise UsageError("policy: nothing to change; give a policy or a knob (see hicachectl policy --help)")
    return _change(context, {"type": "policy", **policies, "knobs": knobs, **args.change_fields(options)}, options)


def _change(context: Context, body: dict[str, Any], options: Namespace) -> int:
    return print_answer(context, context.ask(body, args.budget_s(options)))


def print_answer(context: Context, answer: dict[str, Any]) -> int:
    """Print an operation's answer; 0 when it succeeded (or was so already)."""
    code = EXIT_DONE if answer.get("success") else EXIT_FAILED
    if context.json:
        context.document(answer)
        return code
    context.say(str(answer.get("message") or ("done" if answer.get("success") else "failed")))
    if context.quiet and code == EXIT_DONE:
        return code
    facts = [f"revision {answer['revision']}", f"state {answer['state']}"] if "revision" in answer else []
    if answer.get("operation_id"):
        facts.append(f"operation {answer['operation_id']}")
    if answer.get("dry_run"):
        facts.append("dry run: thrown away")
    elif answer.get("changed") is False:
        facts.append("nothing to change")
    if answer.get("changed_keys"):
        facts.append("changed " + ", ".join(answer["changed_keys"]))
    if answer.get("prepare_ms") or answer.get("commit_ms"):
        facts.append("prepare {:.1f} ms, freeze {:.1f} ms, commit {:.1f} ms".format(
            *(max(0.0, answer.get(key) or 0.0) for key in ("prepare_ms", "freeze_ms", "commit_ms"))))  # fmt: skip
    if facts:
        context.line("  " + " · ".join(facts))
    ranks = answer.get("ranks") or []
    if ranks:
        context.line()
        context.table(
            ("RANK", "OK", "STALL_US", "MESSAGE"),
            [(r["rank"], r["success"], r.get("stall_us"), r.get("message")) for r in ranks],
        )
    for row in answer.get("diff") or []:
        keys = ", ".join(row.get("changed_keys") or []) or "nothing"
        context.line(f"  rank {row.get('rank')}: {row.get('relation')}; differs in: {keys}")
    for note in answer.get("notes") or []:
        context.line(f"note: {plain(str(note))}")
    for warning in answer.get("warnings") or []:
        context.note(f"warning: {plain(str(warning))}")
    return code
