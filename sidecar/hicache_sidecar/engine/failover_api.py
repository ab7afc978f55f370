"""GET and PUT /hicache/failover: policies checked, on the ranks too where they are here, kept, then followed."""

import difflib
import math

import msgspec
import trio

from hicache_proto.errors import HicacheError, InvalidConfig, InvalidRequest
from hicache_proto.failover import (
    ANY_BACKEND,
    MAX_POLICIES,
    FailoverDocument,
    FailoverPolicy,
    FailoverRank,
    Policies,
    SetFailoverRequest,
)
from hicache_proto.hooklink import Describe
from hicache_proto.model import TargetState
from hicache_sidecar.core.actor import Actor
from hicache_sidecar.core.failover_types import look, policy_for, shown_policies, shown_spare, spare_target
from hicache_sidecar.core.redaction import REDACTED, scrub, secrets_in
from hicache_sidecar.engine.failover import SETTING, FailoverDriver
from hicache_sidecar.engine.goals import Goal
from hicache_sidecar.engine.operation import Job

NAMES_S = 1.0  # how long the answer waits for a rank to name its backends


def document(driver: FailoverDriver, warnings: list[str] | None = None) -> FailoverDocument:
    """Where the failover stands; secrets redacted."""
    machine, facts = driver.machine, driver.facts()
    episode = machine.episode
    backend = facts.desired.backend if facts.desired is not None else None
    policy = policy_for(machine.policies, episode.home.backend if episode is not None else backend)
    ranks = []
    for view in facts.ranks:
        condition, why, _ = look(view, policy.watch)
        ranks.append(FailoverRank(rank=view.rank, condition=condition, why=why, bypass=view.bypass))
    left_s = None if math.isinf(machine.until) else max(0.0, machine.until - trio.current_time())
    state = machine.state
    if episode is None:  # the machine looks again in a moment; what is shown follows the policies at once
        state = "off" if policy.action == "none" else "watching" if state == "off" else state
    return FailoverDocument(
        policies=shown_policies(machine.policies),
        state=state,
        reason=machine.reason,
        backend=backend,
        home=shown_spare(episode.home) if episode is not None else None,
        attempts=machine.pace.attempts,
        next_try_in_s=None if left_s is None else round(left_s, 3),
        transitions=machine.pace.transitions,
        steps=list(driver.steps),
        ranks=ranks,
        warnings=[*(warnings or []), *([driver.unreadable] if driver.unreadable else [])],
    )


async def set_failover(driver: FailoverDriver, request: SetFailoverRequest, actor: Actor) -> FailoverDocument:
    """Check, keep, follow; the answer is the new document.

    Raises:
        InvalidRequest: nothing to do, or a policy that contradicts itself. HicacheError: what a rank says of a spare.
        JournalFull: nothing changed.
    """
    if request.policies is None and not request.release:
        raise InvalidRequest("nothing to change: give policies, or release", details={"field": "policies"})
    machine, warnings = driver.machine, []
    if request.policies is not None:
        policies = _merged(machine.policies, request)
        for name, policy in policies.items():
            if policy is not machine.policies.get(name):
                _check(name, policy)
        fresh = {name: policy for name, policy in policies.items() if policy is not machine.policies.get(name)}
        warnings = [*await _ask_ranks(driver, fresh), *await _unknown(driver, fresh)]
        async with driver.writing:
            policies = _merged(machine.policies, request)  # as they are now: another request may have come first
            record = msgspec.structs.replace(machine.record(), policies=policies)
            await trio.to_thread.run_sync(driver.ctx.book.set, SETTING, driver.stored(record))
            machine.set_policies(policies)
        driver.unreadable = ""
        driver.ctx.hub.publish("failover_policy", backends=sorted(policies), actor=actor.name)
    if request.release:
        machine.release(trio.current_time())
    driver.ctx.write_audit(driver.ctx.actor_name(actor), "failover", "success", reason=request.reason[:1000])
    driver.wake()
    return document(driver, warnings)


def _merged(present: Policies, request: SetFailoverRequest) -> Policies:
    asked = request.policies or {}
    policies = dict(present) if request.keep_others else {}
    for name, policy in asked.items():
        policies.pop(name, None)
        if policy is not None:
            policies[name] = policy
    if len(policies) > MAX_POLICIES:
        raise InvalidRequest(f"at most {MAX_POLICIES} policies", details={"field": "policies"})
    return policies


def _check(name: str, policy: FailoverPolicy) -> None:
    """What types cannot say.

    Raises:
        InvalidRequest, InvalidConfig.
    """
    field = f"policies.{name[:80]}"
    if not name or len(name) > 128:
        raise InvalidRequest("a policy needs the name of a backend, or *", details={"field": "policies"})
    if policy.action == "spares" and not policy.spares:
        raise InvalidRequest(f"{field}: action spares needs at least one spare", details={"field": field})
    if policy.action != "spares" and policy.spares:
        raise InvalidRequest(f"{field}: spares are used by action spares alone", details={"field": field})
    if policy.backoff_max_s < policy.backoff_s:
        raise InvalidRequest(f"{field}: backoff_max_s is below backoff_s", details={"field": field})
    for place, spare in enumerate(policy.spares):
        if REDACTED in (spare.hicache_storage_backend_extra_config_json or ""):
            raise InvalidConfig(
                f"{field}.spares[{place}]: the config holds {REDACTED}, as it is shown: give the secret, or a *_file",
                details={"field": field, "reason": "redacted"},
            )


async def _ask_ranks(driver: FailoverDriver, policies: Policies) -> list[str]:
    """Every new spare goes through VALIDATE on every rank: a typing error is found now, not in the night.

    Returns:
        A warning when the ranks could not be asked.

    Raises:
        HicacheError: what a rank says, with the spare's place in front.
    """
    ctx = driver.ctx
    spares = [(name, place, spare) for name, p in policies.items() for place, spare in enumerate(p.spares)]
    if not spares:
        return []
    if not ctx.registry.complete:
        return ["not all ranks are connected: the spares were not checked"]
    desired = ctx.book.desired
    for name, place, spare in spares:
        target = spare_target(spare, desired[0] if desired is not None else TargetState())
        job = Job(kind="check", verb="failover", actor="", deadline=trio.current_time() + ctx.settings.validate_s,
                  hub=ctx.hub, target=target)  # fmt: skip  # never claimed: it only names the secrets to scrub
        mode = policies[name].mode
        goal = Goal(kind="check", verb="failover", target=target, mode="drain" if mode == "auto" else mode, swap=True)
        try:
            driver.changes.check_capabilities(goal)
            await driver.changes.validate(job, goal)
        except HicacheError as exc:
            known = secrets_in(target.extra_config)
            text = str(scrub(f"spare {place} of {name!r}: {exc.message}", known))
            raise type(exc)(text, details=scrub(exc.details, known), hint=exc.hint) from None
    return []


async def _unknown(driver: FailoverDriver, policies: Policies) -> list[str]:
    """Policies that can never apply: the engine knows no such backend. No error: the policy may be made before the
    engine's host has it, and a rank that does not answer says nothing."""
    ctx = driver.ctx
    names = [name for name in policies if name != ANY_BACKEND]
    first = next(iter(ctx.registry.live.values()), None)
    if not names or first is None:
        return []
    told = await ctx.fanout.ask_one(first.rank, first.id, 0, Describe(), trio.current_time() + NAMES_S)
    rows = (told.answer.data or {}).get("backends", []) if told.answer is not None and told.ok else []
    known = sorted(str(row.get("name")) for row in rows)
    return [
        f"policies.{name[:80]}: the engine knows no such backend{_like(name, known)}"
        for name in names
        if known and name not in known
    ]


def _like(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; it knows {', '.join(known)}"
