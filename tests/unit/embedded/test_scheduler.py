"""The scheduler in one process: equal tokens from every tier, chunking, concurrency, aborts, flushes, idle reports."""

import random
from collections.abc import Iterator

import pytest
from tests.unit.embedded.engines import Engine, text

from hicache_hooks.embedded.messages import Flush, Submit
from hicache_hooks.embedded.scheduler import NoHook
from hicache_proto.model import MANDATORY_COUNTERS


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    """Answers without any cache hit: flushed before every prompt."""
    made = Engine(chunk_tokens=512)
    yield made
    made.close()


def computed(reference: Engine, prompt: list[int], new: int = 16) -> list[int]:
    assert reference.flush().ok
    done = reference.generate(prompt, new)
    assert (done.device, done.host, done.storage) == (0, 0, 0)
    reference.idle()
    return done.output


def test_a_repeat_comes_from_l1_with_the_same_tokens(engine: Engine, reference: Engine) -> None:
    prompt = text(1, 200)
    first, again = engine.generate(prompt), engine.generate(prompt)
    assert first.output == again.output == computed(reference, prompt)
    assert (first.device, first.host, first.storage) == (0, 0, 0)
    assert (again.device, again.host) == (192, 0)
    engine.idle()


def test_evicted_pages_come_back_from_l2_with_the_same_tokens(reference: Engine) -> None:
    engine = Engine(l1_tokens=512)
    prompts = [text(10 + i, 220) for i in range(5)]  # each 14 of the 32 pages of L1
    expected = [computed(reference, p) for p in prompts]
    assert [engine.generate(p).output for p in prompts] == expected
    engine.idle()
    again = [engine.generate(p) for p in prompts]
    assert [d.output for d in again] == expected
    assert sum(d.host for d in again) >= 3 * 208
    engine.idle()
    engine.close()


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_other_write_policies_give_the_same_tokens(reference: Engine, policy: str) -> None:
    engine = Engine(l1_tokens=512, write_policy=policy)
    prompts = [text(20 + i, 220) for i in range(4)]
    expected = [computed(reference, p) for p in prompts]
    for _ in range(3):
        assert [engine.generate(p).output for p in prompts] == expected
    engine.idle()
    engine.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_every_layout_gives_the_same_tokens(reference: Engine, layout: str) -> None:
    engine = Engine(l1_tokens=512, layout=layout)
    prompts = [text(30 + i, 220) for i in range(3)]
    expected = [computed(reference, p) for p in prompts]
    assert [engine.generate(p).output for p in prompts] == expected
    again = [engine.generate(p) for p in prompts]
    assert [d.output for d in again] == expected
    assert any(d.host for d in again)
    engine.idle()
    engine.close()


def test_concurrent_requests_give_the_tokens_they_give_alone(reference: Engine) -> None:
    """Shared prefixes, all lengths, more requests than fit at once."""
    engine = Engine(l1_tokens=768, max_running=6)
    common = text(40, 130)
    rng = random.Random(3)
    prompts = [common[: rng.randrange(0, 131)] + text(41 + i, rng.randrange(1, 200)) for i in range(24)]
    expected = [computed(reference, p, 1 + i) for i, p in enumerate(prompts)]
    rids = [engine.submit(p, 1 + i) for i, p in enumerate(prompts)]
    assert [d.output for d in engine.finish(rids)] == expected
    engine.idle()
    engine.close()


def test_a_second_turn_reuses_what_decoding_wrote(engine: Engine, reference: Engine) -> None:
    prompt = text(50, 60)
    first = engine.generate(prompt, 100)
    turn = prompt + first.output + text(51, 30)
    second = engine.generate(turn, 20)
    assert second.device >= (60 + 99) // 16 * 16
    assert second.output == computed(reference, turn, 20)
    engine.idle()


def test_chunked_prefill_lets_others_decode_meanwhile(engine: Engine) -> None:
    short = engine.submit(text(60, 20), 40)
    engine.until("first token", lambda: engine.scheduler.running and not engine.scheduler.running[0].prefilling)
    long = engine.submit(text(61, 400), 1)
    seen = set()
    while long not in engine.done:
        engine.pass_()
        counters = engine.scheduler.idle_report().counters
        seen.add((counters["chunked_prefill"], counters["running_batch"]))
    assert (1, 2) in seen
    assert short not in engine.done  # 400 tokens are 7 passes of 64; the short one has decoded through all of them
    engine.finish([short])


def test_the_idle_report_names_every_mandatory_counter(engine: Engine) -> None:
    """F2: what this engine cannot have is 0, not missing."""
    report = engine.scheduler.idle_report()
    assert set(MANDATORY_COUNTERS) <= set(report.counters)
    assert not any(report.counters.values())
    engine.submit(text(70, 100), 4)
    assert engine.scheduler.idle_report().counters["waiting_queue"] == 1
    engine.scheduler.run_pass()
    busy = engine.scheduler.idle_report()
    assert busy.counters["running_batch"] == 1
    assert busy.ages_ms["running_batch"] >= 0
    engine.idle()


def test_idle_is_reached_without_new_traffic(engine: Engine) -> None:
    """F1: completions of write-throughs are processed while there is no batch."""
    engine.generate(text(71, 300), 1)
    engine.idle()
    assert engine.cache.stats().get("internal_errors", 0) == 0


class ClosedHook(NoHook):
    open = False

    def admit(self) -> bool:
        return self.open


def test_held_requests_wait_in_front_of_the_queues(engine: Engine) -> None:
    """Rule 12: held requests are no blockers, aborts reach them, and they run when the gate opens."""
    hook = ClosedHook()
    engine.scheduler.hook = hook
    kept, dropped = engine.submit(text(72, 50), 3), engine.submit(text(73, 50), 3)
    for _ in range(3):
        engine.scheduler.run_pass()
    assert not any(engine.scheduler.idle_report().counters.values())
    engine.scheduler.cancel(dropped)
    hook.open = True
    engine.finish([kept])
    assert dropped not in engine.done
    engine.idle()


def test_an_abort_at_any_moment_releases_everything(reference: Engine) -> None:
    """F22, F42: pages and locks come back once, whatever state the request was in; the others do not notice."""
    engine = Engine(l1_tokens=512, max_running=4)
    rng = random.Random(5)
    keep = text(80, 150)
    expected = computed(reference, keep, 12)
    for round_ in range(30):
        rids = [
            engine.submit(text(81 + rng.randrange(6), rng.randrange(1, 250)), rng.randrange(1, 30)) for _ in range(4)
        ]
        kept = engine.submit(keep, 12)
        for rid in rids:
            for _ in range(rng.randrange(4)):
                engine.scheduler.run_pass()
            engine.scheduler.cancel(rid)
        assert engine.finish([kept])[0].output == expected, round_
        engine.idle()
    assert engine.scheduler._reserved == 0
    assert engine.cache.stats().get("internal_errors", 0) == 0
    engine.close()


def test_a_flush_waits_for_idle_and_says_why_it_could_not(engine: Engine) -> None:
    prompt = text(90, 100)
    engine.submit(prompt, 100)
    engine.scheduler.run_pass()
    engine.scheduler.flush(Flush(1000, 0.0))
    engine.scheduler.run_pass()
    refused = engine.flushed[1000]
    assert not refused.ok
    assert refused.blocked_by["running_batch"] == 1
    assert engine.flush(10.0).ok
    assert engine.generate(prompt, 1).device == 0


def test_what_can_never_run_is_refused_at_once(engine: Engine) -> None:
    for tokens, new in (([], 1), ([1], 0), (text(91, 500), 13)):
        engine.scheduler.submit(Submit("no", tokens, new))
        assert engine.failed.pop("no").error.code == "invalid_request"
    engine.generate(text(92, 500), 12)
    engine.idle()


def test_closing_fails_new_and_held_requests_and_finishes_the_others(engine: Engine) -> None:
    running = engine.submit(text(93, 40), 5)
    engine.scheduler.run_pass()
    engine.scheduler.hook = ClosedHook()
    held = engine.submit(text(94, 40), 5)
    engine.scheduler.close("the engine is stopping")
    late = engine.submit(text(95, 40), 5)
    engine.until("answers", lambda: running in engine.done)
    assert {held, late} == set(engine.failed)
    assert engine.failed[late].error.code == "no_engine"
    engine.failed.clear()
    engine.idle()


def test_fail_all_ends_every_request(engine: Engine) -> None:
    rids = {engine.submit(text(96 + i, 100), 50) for i in range(5)}
    engine.scheduler.run_pass()
    engine.scheduler.fail_all()
    assert set(engine.failed) == rids
    engine.failed.clear()
    engine.idle()


def test_an_answer_ends_at_eos_only_when_asked(engine: Engine) -> None:
    """The seeded model says token 257 sooner or later on some prompt; then ignore_eos decides."""
    for seed in range(200):
        prompt = text(1000 + seed, 20)
        full = engine.generate(prompt, 60)
        if 257 in full.output[:-1]:
            break
    else:
        pytest.fail("no prompt of 200 led to the end token")
    engine.scheduler.submit(Submit("eos", prompt, 60, ignore_eos=False))
    (ended,) = engine.finish(["eos"])
    assert ended.finish_reason == "stop"
    assert ended.output == full.output[: full.output.index(257) + 1]
    engine.idle()
