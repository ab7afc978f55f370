"""The table of commands: name, module and one line of help. Loading it loads no command."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from hicache_sidecar.cli.context import Context

Run = Callable[[Context, list[str]], int]


class Command(NamedTuple):
    """``module`` holds a function ``run_<name>(context, arguments) -> exit code``."""

    module: str
    summary: str

    def load(self, name: str) -> Run:
        """Import the command's module and return its function."""
        run: Run = getattr(importlib.import_module(f"hicache_sidecar.cli.{self.module}"), f"run_{name}")
        return run


# In the order of the help text.
COMMANDS: dict[str, Command] = {
    "status": Command("reads", "backend, config and policies, as the ranks report them"),
    "idle": Command("reads", "every counter of every rank, and what blocks"),
    "ranks": Command("reads", "connected ranks and what their engine can do"),
    "backends": Command("reads", "known backends, their options, what is missing on the engine's host"),
    "attach": Command("changes", "attach a storage backend"),
    "swap": Command("changes", "replace the attached backend in one operation"),
    "detach": Command("changes", "stop using the storage backend; what it holds stays"),
    "policy": Command("changes", "change policies and prefetch knobs of what is attached"),
    "check": Command("changes", "validate and prepare on every rank, then throw it away"),
    "clear": Command("controls", "delete this namespace's pages from the attached store"),
    "bypass": Command("controls", "reads miss and writes are skipped, at once, under load"),
    "resolve": Command("controls", "after drift: adopt what the ranks have, or reapply what is desired"),
    "drain": Command("controls", "close admission and wait until idle"),
    "resume": Command("controls", "open admission again"),
    "failover": Command("failover", "what happens when a store fails: show, set, unset, release"),
    "operations": Command("operations", "list operations, or show one"),
    "cancel": Command("operations", "cancel an operation; the old state is restored"),
    "history": Command("operations", "revisions: who, when, why, what"),
    "rollback": Command("operations", "go back to the state of a revision"),
    "watch": Command("operations", "print events as they happen"),
    "bundle": Command("bundle", "what a bug report needs, in one file without secrets"),
    "demo": Command("demo", "the main job, end to end, on the embedded engine"),
    "completion": Command("completion", "completion script for bash, zsh or fish"),
}
