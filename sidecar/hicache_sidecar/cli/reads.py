"""Commands that only look: status, idle, ranks, backends."""

import re
from collections.abc import Iterator
from typing import Any

from hicache_sidecar.cli.arguments import parse, parser
from hicache_sidecar.cli.context import EXIT_DONE, EXIT_NO_ENGINE, EXIT_NOT_IDLE, Context
from hicache_sidecar.cli.streams import plain

SGLANG_FIELDS = (
    ("hicache_storage_backend", "backend"),
    ("hicache_storage_backend_extra_config", "extra config"),
    ("hicache_storage_prefetch_policy", "prefetch policy"),
    ("hicache_write_policy", "write policy"),
)

MAX_WORDS = 4  # of a choice that is printed instead of its type


def run_status(context: Context, arguments: list[str]) -> int:
    """Print the status; 6 when the engine is down or ranks are missing, else 0."""
    made = parser("status", "Backend, config and policies, as the ranks report them.")
    made.add_argument("--fresh", action="store_true", help="ask the ranks now instead of reading their last reports")
    options = parse(context, made, arguments)
    status = context.ask({"type": "status", "fresh": options.fresh})
    code = EXIT_NO_ENGINE if status.get("state") == "engine_down" or status.get("missing_ranks") else EXIT_DONE
    if context.json:
        context.document(status)
        return code
    pairs: list[tuple[str, Any]] = [("engine", status.get("engine_id")), ("state", status.get("state"))]
    if status.get("reason"):
        pairs.append(("because", status["reason"]))
    pairs.append(("revision", status.get("revision")))
    pairs += [(name, status.get(field)) for field, name in SGLANG_FIELDS]
    said = [_said(rank) for rank in status.get("ranks") or []]
    first = next((rank for rank, text in enumerate(said) if text), None)
    if first is not None:
        pairs.append(
            ("store", said[0] if len(set(said)) == 1 else f"rank {status['ranks'][first]['rank']}: {said[first]}")
        )
    operation = status.get("operation")
    if operation:
        pairs.append(
            ("operation", " ".join(str(operation[key]) for key in ("id", "kind", "phase") if key in operation))
        )
    if status.get("missing_ranks"):
        pairs.append(("missing ranks", status["missing_ranks"]))
    if status.get("ranks") and status.get("agreed") is False:
        pairs.append(("agreed", False))
    context.pairs(pairs)
    if status.get("ranks"):
        context.line()
        context.table(
            ("RANK", "DP", "PP", "TP", "PID", "EPOCH", "STATE", "BACKEND", "REV", "BYPASS", "AGE_MS"),
            [
                (r["rank"], r["dp_rank"], r["pp_rank"], r["tp_rank"], r["pid"], r["epoch"], r["state"],
                 r["hicache_storage_backend"], r["revision"], r["bypass"], r["report_age_ms"])
                for r in status["ranks"]
            ],
        )  # fmt: skip
    usage = status.get("usage")
    if usage:
        context.line()
        names = ("hit", "miss", "error", "timeout", "skipped", "bytes")
        context.table(
            ("CALL", *(name.upper() for name in names)),
            [(call, *(counts.get(name, 0) for name in names)) for call, counts in sorted(usage.items())],
        )
    stores = status.get("usage_by_backend")
    if stores:
        context.line()
        _stores(context, stores, status)
    for drift in status.get("drift") or []:
        context.note(f"drift: rank {drift['rank']} {drift['field']}: desired {drift['desired']!r}, "
                     f"reported {drift['reported']!r}")  # fmt: skip
    for warning in status.get("warnings") or []:
        context.note(f"warning: {warning}")
    return code


def _said(rank: dict[str, Any]) -> str:
    """What the rank's store said of itself when it was attached."""
    facts = {key: {True: "yes", False: "no"}.get(fact, fact) for key, fact in (rank.get("store") or {}).items()}
    return ", ".join(filter(None, [rank.get("inner") or "", *(f"{key} {fact}" for key, fact in facts.items())]))


def _stores(context: Context, stores: dict[str, Any], status: dict[str, Any]) -> None:
    """One line per store: what was asked of it and what came of it.

    A page that a look-up did not find is missed as much as one that was found and not delivered.
    """
    breakers = sorted({r["guard"]["breaker"] for r in status.get("ranks") or [] if r.get("guard")})
    attached = status.get("hicache_storage_backend")
    rows = []
    for name, store in sorted(stores.items()):
        get, put, exists = ({**store["ops"].get(kind, {})} for kind in ("get", "put", "exists"))
        missed = get.get("miss", 0) + exists.get("miss", 0)
        failed = sum(counts.get(what, 0) for counts in store["ops"].values() for what in ("error", "timeout"))
        here = re.split("[@:]", name)[0] == attached
        rows.append((
            name, store["lookups"], get.get("hit", 0), missed, failed, get.get("bytes", 0), put.get("bytes", 0),
            ",".join(breakers) if here else "-", "yes" if store["write_only"] else "no",
        ))  # fmt: skip
    context.table(
        (
            "STORE", "REQUESTS", "PAGES_READ", "MISSED", "FAILED", "READ_BYTES", "WRITTEN_BYTES", "BREAKER",
            "NEVER_READ",
        ),
        rows,
    )  # fmt: skip


def run_idle(context: Context, arguments: list[str]) -> int:
    """Print the idle report; 3 when something blocks."""
    made = parser("idle", "Every counter of every rank, and what blocks. Exit code 3 when not idle.")
    made.add_argument("--all", action="store_true", help="counters that are zero too")
    options = parse(context, made, arguments)
    idle = context.ask({"type": "idle"})
    code = EXIT_DONE if idle.get("idle") else EXIT_NOT_IDLE
    if idle.get("missing_ranks"):
        code = EXIT_NO_ENGINE
    if context.json:
        context.document(idle)
        return code
    pairs: list[tuple[str, Any]] = [("idle", idle.get("idle"))]
    if idle.get("missing_ranks"):
        pairs.append(("missing ranks", idle["missing_ranks"]))
    if held := sum(rank.get("held", 0) for rank in idle.get("ranks") or []):
        pairs.append(("requests held", held))
    context.pairs(pairs)
    blocked = {(b["rank"], b["name"]) for b in idle.get("blocked_by") or []}
    rows = [
        (rank["rank"], name, count, (rank["rank"], name) in blocked)
        for rank in idle.get("ranks") or []
        for name, count in sorted(rank["counters"].items())
        if count or options.all or (rank["rank"], name) in blocked
    ]
    if rows:
        context.line()
        context.table(("RANK", "COUNTER", "COUNT", "BLOCKS"), rows)
    for rank in idle.get("ranks") or []:
        if rank.get("missing_counters"):
            context.note(f"rank {rank['rank']}: incomplete idle report, missing: {', '.join(rank['missing_counters'])}")
        if rank.get("stuck"):
            context.note(f"rank {rank['rank']}: stuck inside the store: {', '.join(rank['stuck'])}")
    return code


def run_ranks(context: Context, arguments: list[str]) -> int:
    """Print the connected ranks; 6 when one is missing."""
    parse(context, parser("ranks", "Connected ranks and what their engine can do."), arguments)
    ranks = context.ask({"type": "ranks"})
    code = EXIT_NO_ENGINE if ranks.get("missing_ranks") or not ranks.get("ranks") else EXIT_DONE
    if context.json:
        context.document(ranks)
        return code
    listed = ranks.get("ranks") or []
    pairs: list[tuple[str, Any]] = [("engine", ranks.get("engine_id")), ("expected", ranks.get("expected"))]
    if ranks.get("missing_ranks"):
        pairs.append(("missing ranks", ranks["missing_ranks"]))
    context.pairs(pairs)
    if listed:
        context.line()
        context.table(
            ("RANK", "DP", "PP", "TP", "PID", "EPOCH", "UP", "ENGINE", "LAYOUT", "PAGE", "TREE", "HOT", "OP", "HOLDS"),
            [
                (r["rank"], r["dp_rank"], r["pp_rank"], r["tp_rank"], r["pid"], r["epoch"], r["connected"],
                 r["capabilities"].get("engine"), r["capabilities"].get("layout"), r["capabilities"].get("page_size"),
                 r["capabilities"].get("tree"), r["capabilities"].get("hot"), r.get("op_phase"), r.get("holds"))
                for r in listed
            ],
        )  # fmt: skip
    for rank in listed:
        for problem in rank["capabilities"].get("problems") or []:
            context.note(f"rank {rank['rank']}: {problem}")
    return code


def run_backends(context: Context, arguments: list[str]) -> int:
    """Print the known backends, or one with its options."""
    made = parser("backends", "Known backends, their options, and what is missing on the engine's host.")
    made.add_argument("name", nargs="?", help="show this backend's options")
    options = parse(context, made, arguments)
    answer = context.ask({"type": "backends"})
    if context.json:
        context.document(answer)
        return EXIT_DONE
    listed = [b for b in answer.get("backends") or [] if options.name in (None, b.get("name"))]
    if options.name is not None and not listed:
        from hicache_proto.errors import UnknownBackend

        raise UnknownBackend(f"no backend named {options.name!r} here")
    context.table(
        ("BACKEND", "AVAILABLE", "LAYOUTS", "MISSING"),
        [(b.get("name"), b.get("available"), b.get("layouts"), b.get("missing")) for b in listed],
    )
    if options.name is not None:
        _print_options(context, listed[0])
    return EXIT_DONE


def _print_options(context: Context, backend: dict[str, Any]) -> None:
    manifest = backend.get("manifest")
    if manifest:
        context.line()
        names = ("summary", "alignment", "needs_registration", "shared", "parallel_axes")
        context.pairs([(name.replace("_", " "), manifest.get(name)) for name in names])
    schema = backend.get("options_schema")
    rows = list(_option_rows(schema, schema.get("$defs", {}))) if isinstance(schema, dict) else []
    if rows:
        context.line()
        context.table(("OPTION", "TYPE", "DEFAULT", "MEANING"), rows)
    notes = backend.get("notes")
    for note in [notes] if isinstance(notes, str) else notes or []:
        context.line(plain(str(note)))


def _option_rows(schema: dict[str, Any], defs: dict[str, Any], within: str = "") -> Iterator[tuple[Any, ...]]:
    """Name, type, default and meaning of each option; those of an object follow it, as ``config.name``."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for name, option in sorted(properties.items()):
        if not isinstance(option, dict):
            continue
        default = "(required)" if name in required else option.get("default")
        yield f"{within}{name}", _type_name(option), default, option.get("description")
        for kind in _kinds(option):
            inside = defs.get(str(kind.get("$ref", "")).rpartition("/")[2])
            if isinstance(inside, dict) and not within:  # one level: no backend has more
                yield from _option_rows(inside, defs, f"{name}.")


def _kinds(option: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in option.get("anyOf") or [option] if isinstance(kind, dict)]


def _type_name(option: dict[str, Any]) -> str:
    """``string|null`` of a JSON schema; of a choice among a few words these."""
    names: list[str] = []
    for kind in _kinds(option):
        words = [str(word) for word in kind.get("enum", ())]
        if "type" in kind:
            names.append(str(kind["type"]))
        elif words and len(words) <= MAX_WORDS and not any(word.isdigit() for word in words):
            names += words
        else:  # many words, or switches and numbers that may be written as text
            names.append("string" if words else "object" if "$ref" in kind else "any")
    return "|".join(names)
