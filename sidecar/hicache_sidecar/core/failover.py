"""The failover machine: from guard reports to steps. Pure: the clock and the dice are given, nothing is awaited.

Rules
=====

1. Bypass first (F77): it works in milliseconds, under load, and can be taken back. Then, by policy, detach or go to a
   spare, each by one ordinary operation. While an operation of anybody runs, nothing is done.
2. A breaker must have been open for ``confirm_s``: the guard itself already keeps requests from waiting.
3. Every failover is an *episode*. It remembers ``home`` and the desired state that it stands on. A desired state that
   the episode did not make, or any change by an operator, ends it: the operator's word stands, our bypass is lifted.
   An operator who lifts our bypass is left alone with that store until it was well once. An operator who cancels our
   operation holds everything (as 5).
4. Going back (``reconnect``) waits for ``min_stay_s`` and a growing, jittered pause (F78). A bypassed store is tried
   when its guard's own probes find it well; a detached one by an operation back, whose PREPARE builds and proves it.
   Back at home is a *trial*: well for ``steady_s`` ends the episode and the growth.
5. Flap hold (F84): at most ``flap_limit`` transitions (a bypass turned on; a return) in ``flap_window_s``. What puts a
   store to use needs room for its failure as well, else everything is held, on the safe side, until ``release`` or an
   operator's change.
6. Spares are tried in order from the one that failed on, round, home last; each that could not be attached rests.

``next`` decides, ``bypass_done`` and ``moved`` say how it went; ``notes`` collects what happened, for events.
"""

import math
from collections.abc import Callable

import msgspec

from hicache_proto.failover import FailoverPolicy, Policies
from hicache_proto.model import TargetState
from hicache_sidecar.core.failover_pace import Pace
from hicache_sidecar.core.failover_types import (
    DETACHED,
    HOME,
    Condition,
    Decision,
    Episode,
    Facts,
    Health,
    Move,
    Moving,
    Record,
    SetBypass,
    Wait,
    health,
    policy_for,
    spare_target,
)
from hicache_sidecar.core.redaction import REDACTED

RETRY_S = 1.0  # a rank that could not be told, another operation's turn: looked at again so soon

Note = tuple[str, str, str | None, str | None]  # step, reason, backend, to


class Failover:
    """See the module's text. Times are of the caller's clock, seconds."""

    def __init__(self, record: Record, uniform: Callable[[], float]) -> None:
        """``uniform`` draws from 0 to 1: the jitter of pauses."""
        self.policies: Policies = dict(record.policies)
        self.episode = record.episode
        self.held = record.held
        self.left_alone = record.left_alone
        self.notes: list[Note] = []
        self.state, self.reason = "off", ""
        self.until = math.inf
        self.pace = Pace(uniform, record.return_at)
        self._sick_since: float | None = None
        self._trial_since: float | None = None
        self._pause_until = -math.inf
        self._lift = record.lift  # our bypass is on and its episode is over
        self._operators_bypass = False

    # ---- what others do

    def record(self) -> Record:
        """What must be durable now."""
        return Record(
            policies=self.policies,
            episode=self.episode,
            held=self.held,
            left_alone=self.left_alone,
            lift=self._lift,
            return_at=self.pace.not_before,
        )

    def set_policies(self, policies: Policies) -> None:
        """An operator's new policies; a running episode goes on under them."""
        self.policies = dict(policies)
        self.pace.forget()
        self._pause_until = -math.inf

    def release(self, now: float) -> bool:
        """End a hold by hand; False when there was none."""
        was, self.held = self.held, ""
        self.pace.calm()
        self.pace.at_once(now)
        if was:
            self._note("release", "by an operator")
        return bool(was)

    def operator_acted(self, what: str, *, bypass: bool | None = None) -> None:
        """An operator changed something (rule 3). ``bypass``: the switch that was set, if it was that."""
        if self.episode is not None:
            self._end(f"an operator's {what}", lift=bypass is None)
        if bypass is not None:
            self._lift = False
        self.left_alone, self._operators_bypass = bypass is False, bypass is True
        self.held = ""
        self.pace.calm()

    # ---- the decision

    def next(self, now: float, facts: Facts) -> Decision:
        """The next thing to do; asked again after every result, every report and at ``Wait.until``."""
        if facts.desired is None:
            return self._wait("off", math.inf, "no state is desired yet")
        self._see_desired(now, facts.desired)
        home = self.episode.home if self.episode is not None else facts.desired
        policy = policy_for(self.policies, home.backend)
        self.pace.look(now, policy)
        if facts.blocked:
            return self._wait(self.state, math.inf, facts.blocked)
        if now < self._pause_until:
            return self._wait(self.state, self._pause_until, self.reason)
        seen = health(facts.ranks, policy.watch)
        self._time_sickness(now, seen)
        if self._lift:
            if seen.any_bypassed:
                return SetBypass(False, "the failover is over: an operator took over")
            self._lift = False
        if self.episode is None:
            return self._watch(now, facts.desired, policy, seen)
        if self.episode.bypass and not seen.all_bypassed:
            return SetBypass(True, "a rank came back without its bypass")
        if self.episode.bypass:
            return self._bypassed(now, facts, policy, seen)
        if self.episode.at == HOME:
            return self._trial(now, policy, seen)
        return self._away(now, facts, policy, seen)

    def _watch(self, now: float, desired: TargetState, policy: FailoverPolicy, seen: Health) -> Decision:
        """No episode: is one to begin?"""
        if desired.backend is None or policy.action == "none":
            return self._wait("off", math.inf, "")
        if self.left_alone:
            if seen.condition is not Condition.WELL:
                return self._wait("watching", math.inf, "an operator lifted the bypass; waiting until it is well")
            self.left_alone = False
        if seen.any_bypassed:
            return self._wait("watching", math.inf, "bypassed by an operator")
        if self._sick_since is None:
            return self._wait("watching", math.inf, "")
        due = self._sick_since + policy.confirm_s
        if now < due:
            return self._wait("suspect", due, seen.why)
        self.episode = Episode(home=desired, state=desired, why=seen.why)
        self._trial_since = now
        return SetBypass(True, seen.why)

    def _trial(self, now: float, policy: FailoverPolicy, seen: Health) -> Decision:
        """At home, not bypassed: just back (or the bypass is still to be set)."""
        if self._sick_since is not None:
            due = self._sick_since + policy.confirm_s
            return SetBypass(True, seen.why) if now >= due else self._wait("suspect", due, seen.why)
        if seen.any_bypassed:
            return SetBypass(False, "left over from before")
        if self._trial_since is None:
            self._trial_since = now
        due = self._trial_since + policy.steady_s
        if now >= due or policy.action == "none":
            self._end("well again", step="recovered")
            self.pace.attempts = 0
            return self._wait("watching", math.inf, "")
        return self._wait("trial", due, "back; watched")

    def _bypassed(self, now: float, facts: Facts, policy: FailoverPolicy, seen: Health) -> Decision:
        """Our bypass is on, at home or on a spare: leave it, or lift the bypass when the store is well."""
        if policy.action == "none":
            return SetBypass(False, "the policy was taken away")
        until, why = math.inf, seen.why
        well = seen.condition in (Condition.WELL, Condition.UNKNOWN)
        if not well and policy.action in ("detach", "spares") and not self.held:
            leave = self._leave(now, facts, policy, seen.why)
            if isinstance(leave, Move):
                return leave
            until = leave.until
        if self.held:
            return self._wait("held", math.inf, self.held)
        if policy.action != "bypass" or policy.goes_back:
            back_at = self.pace.back_at(now, policy)
            if now < back_at:
                until = min(until, back_at)
            elif well:
                return SetBypass(False, "its probes find it well") if self.pace.room(policy, 2) else self._hold(policy)
            why = "well; not before its time" if well else why
        return self._wait("bypassed", until, why)

    def _away(self, now: float, facts: Facts, policy: FailoverPolicy, seen: Health) -> Decision:
        """Detached, or on a spare that serves."""
        episode = self._here()
        state = "detached" if episode.at == DETACHED else "on_spare"
        if seen.any_bypassed:
            return SetBypass(False, "left over from the store that was left")
        if episode.at != DETACHED and self._sick_since is not None:
            due = self._sick_since + policy.confirm_s
            return SetBypass(True, seen.why) if now >= due else self._wait("suspect", due, seen.why)
        if policy.action == "none":
            self._end("the policy was taken away")
            return self._wait("off", math.inf, "")
        if self.held:
            return self._wait("held", math.inf, self.held)
        if not policy.goes_back:
            return self._wait(state, math.inf, "no return by itself: reconnect is off")
        if REDACTED in (episode.home.extra_config or ""):
            return self._wait(state, math.inf, "its secrets are not known: attach it by hand")
        due = self.pace.back_at(now, policy)
        if now < due:
            return self._wait(state, due, episode.why)
        if not self.pace.room(policy, 2):
            return self._hold(policy)
        return self._move(episode.home, HOME, "return", facts, policy, f"try {self.pace.attempts + 1} to go back")

    def _leave(self, now: float, facts: Facts, policy: FailoverPolicy, why: str) -> Move | Wait:
        """The next place to go from a store that fails (rule 6)."""
        episode = self._here()
        if policy.action == "detach":
            if now < self.pace.ready_at(DETACHED):
                return Wait(self.pace.ready_at(DETACHED))
            home = episode.home
            target = TargetState(prefetch_policy=home.prefetch_policy, write_policy=home.write_policy)
            return self._move(target, DETACHED, "detach", facts, policy, why)
        count = len(policy.spares)
        order = [(episode.at + 1 + step) % count for step in range(count)] if count else []
        places = [place for place in order if place != episode.at]
        if episode.at != HOME and REDACTED not in (episode.home.extra_config or ""):
            places.append(HOME)
        until = math.inf
        for place in places:
            ready = self.pace.ready_at(place)
            if place == HOME:
                ready = max(ready, self.pace.back_at(now, policy))
            if now < ready:
                until = min(until, ready)
            elif not self.pace.room(policy, 2 if place == HOME else 1):
                self._hold(policy)
                return Wait(math.inf)
            elif place == HOME:
                return self._move(episode.home, HOME, "return", facts, policy, why)
            else:
                return self._move(spare_target(policy.spares[place], episode.home), place, "spare", facts, policy, why)
        return Wait(until)

    def _move(self, target: TargetState, to: int, step: str, facts: Facts, policy: FailoverPolicy, why: str) -> Move:
        mode = policy.mode if policy.mode != "auto" else "hot" if facts.can_hot else "drain"
        self.episode = msgspec.structs.replace(self._here(), moving=Moving(to, target))
        self.state, self.reason = "moving", why
        return Move(target=target, to=to, step=step, mode=mode, why=why)

    # ---- results

    def bypass_done(self, now: float, decision: SetBypass, ok: bool, message: str = "") -> None:
        """Every rank was told (``ok``), or one was not: then it is tried again."""
        if not ok:
            self._pause_until = now + RETRY_S
            self._note("failed", f"bypass: {message}")
            return
        episode = self.episode
        if self._lift or episode is None or not (decision.enabled or episode.bypass):
            # An operator acted while the ranks were told: our bypass must not outlive its episode.
            self._lift = episode is None and decision.enabled and not self._operators_bypass
            self._note("bypass" if decision.enabled else "unbypass", decision.why)
            return
        policy = self._policy_of(episode)
        if decision.enabled:
            if not episode.bypass:
                self.pace.transition(now)
                if episode.at == HOME:  # on a spare that fails now, the time since home was left counts on
                    self.pace.draw_return(now, policy, at_least=policy.min_stay_s)
            self.episode = msgspec.structs.replace(episode, bypass=True, why=decision.why)
            self._note("bypass", decision.why, episode.state.backend)
            return
        self._note("unbypass", decision.why, episode.state.backend)
        self.episode = msgspec.structs.replace(episode, bypass=False)
        self._sick_since, self._trial_since = None, now
        if policy.action == "none":
            self._end("the policy was taken away")
            return
        self.pace.transition(now)
        self.pace.attempts += 1

    def moved(
        self,
        now: float,
        move: Move,
        state: TargetState | None,
        message: str = "",
        *,
        not_begun: bool = False,
        cancelled: bool = False,
    ) -> None:
        """An operation ended; ``state`` is what is desired since, None when it failed.

        ``not_begun``: somebody else's turn, or no engine: not the target's fault. ``cancelled``: an operator said
        stop, which says nothing of the target and lasts until the operator says more.
        """
        if self.episode is None:  # an operator's bypass ended it meanwhile
            return
        episode = msgspec.structs.replace(self.episode, moving=None)
        self.episode = episode
        policy = self._policy_of(episode)
        if state is not None:
            self._arrive(now, move, state, policy)
        elif not_begun:
            self._pause_until = now + RETRY_S
        elif cancelled:
            self.held = f"its operation ({move.step}) was cancelled: held until release, or an operator's change"
            self._note("hold", self.held, episode.state.backend, move.target.backend)
        else:
            self._note("failed", f"{move.step}: {message}", episode.state.backend, move.target.backend)
            if move.to == HOME:
                self.pace.attempts += 1
                self.pace.draw_return(now, policy)
            self.pace.failed(now, move.to, policy)

    def _arrive(self, now: float, move: Move, state: TargetState, policy: FailoverPolicy) -> None:
        left = self._here()
        self.episode = msgspec.structs.replace(left, at=move.to, state=state, bypass=False, moving=None)
        self.pace.reached(move.to)
        self._sick_since, self._trial_since = None, now
        self._note(move.step, move.why, left.state.backend, move.target.backend)
        if move.to == HOME:
            self.pace.transition(now)
            self.pace.attempts += 1
        else:
            self.pace.draw_return(now, policy, at_least=policy.min_stay_s)

    # ---- inner

    def _here(self) -> Episode:
        if self.episode is None:
            raise RuntimeError("no failover is going on")
        return self.episode

    def _see_desired(self, now: float, desired: TargetState) -> None:
        """Whose the desired state is (rule 3); settles a move that a restart of the sidecar interrupted."""
        episode = self.episode
        if episode is None:
            return
        moving = episode.moving
        if moving is not None and desired == moving.target and desired != episode.state:
            why = "found done after a restart of the sidecar"
            self._arrive(now, Move(moving.target, moving.to, "moved", "", why), desired, self._policy_of(episode))
        elif desired != episode.state:
            self._end("the desired state was changed by somebody else", lift=True)
        elif moving is not None:
            self.episode = msgspec.structs.replace(episode, moving=None)

    def _policy_of(self, episode: Episode) -> FailoverPolicy:
        return policy_for(self.policies, episode.home.backend)

    def _time_sickness(self, now: float, seen: Health) -> None:
        """Since when a breaker is open; half-open time counts on, but does not begin it."""
        if seen.condition is Condition.SICK:
            since = now - max(0.0, seen.open_s)
            self._sick_since = since if self._sick_since is None else min(self._sick_since, since)
        elif seen.condition is not Condition.TRYING:
            self._sick_since = None

    def _hold(self, policy: FailoverPolicy) -> Wait:
        """Rule 5."""
        self.held = (
            f"{self.pace.transitions} transitions within {policy.flap_window_s:g} s: held until release, "
            "or an operator's change"
        )
        self._note("hold", self.held, self._here().state.backend)
        return self._wait("held", math.inf, self.held)

    def _end(self, why: str, *, step: str = "ended", lift: bool = False) -> None:
        episode = self._here()
        self._lift = self._lift or (lift and episode.bypass)
        self.episode, self.held = None, ""
        self._trial_since, self._sick_since = None, None
        self.pace.episode_over()
        self._note(step, why, episode.state.backend)

    def _wait(self, state: str, until: float, why: str) -> Wait:
        self.state, self.reason, self.until = state, why, until
        return Wait(until)

    def _note(self, step: str, reason: str, backend: str | None = None, to: str | None = None) -> None:
        self.notes.append((step, reason, backend, to))
