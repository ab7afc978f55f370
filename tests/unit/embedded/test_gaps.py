"""The loop's own measure of its gaps."""

from hicache_hooks.embedded.gaps import Gaps
from hicache_hooks.embedded.messages import Done, Flushed


def done() -> Done:
    return Done("r1", [1], 3, 0, 0, 0, "length")


def told_ms(gaps: Gaps) -> float:
    message = gaps.told(done())
    assert isinstance(message, Done)
    return message.loop_gap_ms


def test_the_longest_turn_since_the_last_answer_is_told_with_the_next() -> None:
    now = [0.0]
    gaps = Gaps(lambda: now[0])
    for turn_s, sleep_s in ((0.010, 5.0), (0.250, 1.0), (0.020, 3.0)):
        gaps.begin()
        now[0] += turn_s
        gaps.end()
        now[0] += sleep_s  # the loop's own: no gap
    gaps.begin()
    now[0] += 0.005
    assert told_ms(gaps) == 250.0
    assert told_ms(gaps) == 5.0, "of the turn that answers, so far"
    now[0] += 0.300
    assert told_ms(gaps) == 305.0


def test_other_messages_go_as_they_are_and_take_nothing() -> None:
    now = [0.0]
    gaps = Gaps(lambda: now[0])
    gaps.begin()
    now[0] = 0.5
    gaps.end()
    flushed = Flushed(1, True)
    assert gaps.told(flushed) is flushed
    assert told_ms(gaps) == 500.0
