"""What the guard can be told in the extra config, beside the prefetch knobs: the live keys named ``guard_...``."""

from dataclasses import dataclass, fields, replace

from hicache_hooks.breaker import BreakerSettings

PREFIX = "guard_"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Durations in seconds, ratios from 0 to 1. Each is the option ``guard_<name>``; README's table says the same."""

    deadline_s: float = 5.0  # a call inside the store for longer is given up; its pages stay reserved until it is back
    window_s: float = 10.0  # of the breaker's ratios
    min_calls: int = 10  # in the window, before a ratio counts
    error_ratio: float = 0.5
    slow_s: float = 2.0  # a call that took longer is slow
    slow_ratio: float = 0.8
    hold_s: float = 2.0  # between opening and the first probe; doubles
    hold_max_s: float = 60.0
    negative_ttl_s: float = 30.0  # a page that the store promised and did not deliver is not asked for; 0: no memory
    probe_idle_s: float = 10.0  # no call for so long: the store is probed; 0: never
    epoch_s: float = 10.0  # between two looks whether the store still holds what it held (F70); 0: never

    def breaker(self) -> BreakerSettings:
        """The breaker's part."""
        return BreakerSettings(
            window_s=self.window_s,
            min_calls=self.min_calls,
            error_ratio=self.error_ratio,
            slow_s=self.slow_s,
            slow_ratio=self.slow_ratio,
            hold_s=self.hold_s,
            hold_max_s=max(self.hold_s, self.hold_max_s),
        )


GUARD_KNOBS = tuple(PREFIX + field.name for field in fields(GuardSettings))
_MAX_S = 86_400.0
# Lower and upper bound, and whether the lower one itself is allowed.
_BOUNDS: dict[str, tuple[float, float, bool]] = {
    "min_calls": (1, 1_000_000, True),
    "error_ratio": (0, 1, False),
    "slow_ratio": (0, 1, False),
    "negative_ttl_s": (0, _MAX_S, True),
    "probe_idle_s": (0, _MAX_S, True),
    "epoch_s": (0, _MAX_S, True),
}


def changed(base: GuardSettings, key: str, value: object) -> GuardSettings:
    """``base`` with the option ``key`` (one of ``GUARD_KNOBS``) set.

    Raises:
        ValueError: wrong type or range; the text says what is allowed, and does not repeat the value.
    """
    name = key.removeprefix(PREFIX)
    low, high, inclusive = _BOUNDS.get(name, (0, _MAX_S, False))
    whole = name == "min_calls"
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not (low <= value <= high) or (value == low and not inclusive):  # type: ignore[operator]
        least = f"from {low:g}" if inclusive else f"above {low:g} and"
        raise ValueError(f"{'an integer' if whole else 'a number'} {least} {'up ' if not inclusive else ''}to {high:g}")
    return replace(base, **{name: value if whole else float(value)})  # type: ignore[arg-type]
