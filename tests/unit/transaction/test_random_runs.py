"""Longer runs than a search can visit: three ranks, several operations and faults, chosen by hypothesis.

Every step is one of the model's successors, so the same invariants are checked; every run ends with the fair ending.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.unit.transaction import model_steps as steps
from tests.unit.transaction import model_world as mw
from tests.unit.transaction.search import REAL, Scenario, settle

# Steps that lead on, so that a random run gets somewhere: a uniform choice would cancel nearly every operation.
FORWARD = ("built", "is durable", "reply", "idle", "commit", "finalize", "starts", "says hello", "answers", "decides")


class RandomRun(RuleBasedStateMachine):
    """The world as one state machine."""

    @initialize(
        ranks=st.integers(2, 3),
        ops=st.integers(1, 3),
        shape=st.sampled_from([{}, {"hot": True}, {"drain": True, "busy": True}, {"rounds": 2, "busy": True}]),
        faults=st.fixed_dictionaries(
            {
                "coord_crashes": st.integers(0, 2),
                "journal_losses": st.integers(0, 1),
                "rank_crashes": st.integers(0, 2),
                "rehellos": st.integers(0, 1),
                "swap_failures": st.integers(0, 1),
                "build_failures": st.integers(0, 1),
                "undo_failures": st.integers(0, 1),
            }
        ),
    )
    def begin(self, ranks: int, ops: int, shape: dict[str, object], faults: dict[str, int]) -> None:
        self.world = mw.start(Scenario(ranks=ranks, ops=ops, **shape, **faults))  # type: ignore[arg-type]

    def take(self, pick: int, words: tuple[str, ...]) -> None:
        found = [after for name, after in steps.successors(REAL, self.world) if any(word in name for word in words)]
        found = [after for after in found if after != self.world]
        if found:
            self.world = found[pick % len(found)]

    @rule(pick=st.integers(0, 10_000))
    def anything(self, pick: int) -> None:
        """Any step at all, faults and lease ends among them."""
        self.take(pick, ("",))

    @rule(pick=st.integers(0, 10_000), times=st.integers(1, 12))
    def onward(self, pick: int, times: int) -> None:
        """Steps that lead on."""
        for _ in range(times):
            self.take(pick, FORWARD)

    @rule(pick=st.integers(0, 10_000))
    def fault(self, pick: int) -> None:
        """A crash, a cut, a failure, the end of a lease."""
        self.take(pick, ("dies", "cut", "fails", "cannot", "lost", "lease", "cancel", "doubt"))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            settle(REAL, self.world)


TestRandomRuns = RandomRun.TestCase
TestRandomRuns.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,  # the same runs everywhere; the slow suite looks further
    suppress_health_check=list(HealthCheck),
)
