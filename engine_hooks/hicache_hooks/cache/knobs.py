"""Live keys of a storage set: the five prefetch knobs, the two policies (spec.md, "Attach") and the guard's settings.

They ride on the set, not on the controller, so that COMMIT's one reference swap moves them together with the
backend and UNDO restores them exactly (F13, F20). A change of live keys alone replaces this frozen object.
"""

from dataclasses import dataclass, field

from hicache_hooks.guard_settings import GuardSettings


@dataclass(frozen=True, slots=True)
class Knobs:
    """Names are SGLang's; durations in seconds, the threshold in tokens."""

    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    prefetch_timeout_max: float | None = None
    hicache_storage_pass_prefix_keys: bool = False
    prefetch_policy: str = "best_effort"
    write_policy: str = "write_through"
    guard: GuardSettings = field(default_factory=GuardSettings)

    def prefetch_budget_s(self, tokens: int) -> float:
        """Budget of the ``timeout`` policy for a fetch of ``tokens`` tokens."""
        budget = self.prefetch_timeout_base + self.prefetch_timeout_per_ki_token * tokens / 1024
        return budget if self.prefetch_timeout_max is None else min(budget, self.prefetch_timeout_max)


def policy_notes(knobs: Knobs) -> list[str]:
    """What is stored when, in one line, where it is not at once: else one test looks as if nothing were stored (F61).

    Both engines count so (``writer.SELECTIVE_HITS``, SGLang's ``write_through_threshold``).
    """
    match knobs.write_policy:
        case "write_back":
            return ["write_back: a page reaches storage when it is evicted from the device, not before"]
        case "write_through_selective":
            text = "a page reaches storage at its 2nd use (2 hits); a first request stores nothing"
            return [f"write_through_selective: {text}"]
        case _:
            return []
