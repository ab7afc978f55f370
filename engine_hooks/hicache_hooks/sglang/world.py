"""Our commands on SGLang's own request broadcast: a world is the tensor-parallel ranks of one replica (rule 11).

The leader appends a ``HookCommand`` to the requests that it pulled; the engine broadcasts the list and dispatches it
in the same loop iteration on every rank (seen at identical loop numbers). The type is ours, not one of the engine's
attach requests: those are answered to the tokenizer, which would take the answer for another call's.

The broadcast pickles what it carries, between the ranks of one engine, as it does with every request; ours holds
bytes that are decoded by type.
"""

import logging
from collections.abc import Callable
from typing import Any

from hicache_hooks.world import WorldCommand, decode, encode

log = logging.getLogger(__name__)

Execute = Callable[[WorldCommand], None]


class HookCommand:
    """A request of the engine's broadcast that carries one command. The engine looks at both attributes."""

    rid = None
    http_worker_ipc = None

    def __init__(self, data: bytes) -> None:
        self.data = data


class BroadcastWorld:
    """``Injector`` over the engine's broadcast. Scheduler thread only.

    An agreement also compares whether the ranks have storage groups (``groups``). Where none has any, they are made
    here, right after the vote, where every rank is known to be. Where they differ, the next attach would make some
    on one rank alone and hang the world (F114): nobody switches, and ``on_split`` is called.
    """

    def __init__(self, *, leader: bool, ranks: int, group: Any = None) -> None:
        """``group``: the engine's CPU (gloo) group of these ranks, for the agreement; None for a world of one."""
        self.leader = leader
        self.ranks = ranks
        self._group = group
        self.has_groups: Callable[[], bool] = lambda: False
        self.make_groups: Callable[[], None] = lambda: None
        self.on_split: Callable[[], None] = lambda: None
        self._execute: Execute | None = None
        self._commands: list[HookCommand] = []

    def bind(self, scheduler: Any, execute: Execute) -> None:
        """Register the request type with the engine's dispatcher; commands go to ``execute``."""
        self._execute = execute
        scheduler._request_dispatcher._mapping[HookCommand] = self._handle

    @property
    def waiting(self) -> bool:
        """True when commands wait for the next pull."""
        return bool(self._commands)

    def take(self) -> list[HookCommand]:
        """What the leader appends to this pull."""
        commands, self._commands = self._commands, []
        return commands

    def inject(self, command: WorldCommand) -> None:
        """See ``Injector``: the command leaves with this iteration's pull, or the next one's."""
        self._commands.append(HookCommand(encode(command)))

    def agree(self, ok: bool) -> bool:
        """See ``Injector``: the minimum over the ranks, bounded by the group's own time-out."""
        if self._group is None:
            return ok
        import torch

        has = self.has_groups()
        vote = torch.tensor([int(ok), int(has), int(not has)], dtype=torch.int32)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=self._group)
        all_ok, all_have, none_has = vote.tolist()
        if not all_have and not none_has:
            self.on_split()
            return False
        if none_has and all_ok:
            try:
                self.make_groups()
            except Exception:
                log.exception("storage groups could not be made; this rank does not switch")
                self.on_split()
                return False
        return bool(all_ok)

    def _handle(self, request: HookCommand) -> None:
        """The engine's dispatcher. Must not raise: that would end the scheduler. None: nothing is answered."""
        try:
            if self._execute is not None:
                self._execute(decode(request.data))
        except Exception:
            log.exception("a command of the sidecar could not be run")
