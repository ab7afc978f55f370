"""The core correctness test over real processes: the same prompt gives the same tokens, wherever its KV came from."""

import random
import threading
from typing import Any

import pytest
from tests.e2e.engine.conftest import SMALL
from tests.rigs.procs import Engine, Processes

WORDS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
)


def prompts(count: int) -> list[str]:
    rng = random.Random(11)
    return [WORDS[: rng.choice((0, 64, 130))] + f"[{i}] " + WORDS * rng.randrange(1, 4) for i in range(count)]


def together(engine: Engine, texts: list[str], **fields: Any) -> list[dict[str, Any]]:
    """All at once, answers in order."""
    answers: list[dict[str, Any] | None] = [None] * len(texts)

    def ask(i: int) -> None:
        answers[i] = engine.generate(texts[i], 24, **fields)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


@pytest.fixture(scope="module")
def computed(engine: Engine) -> list[list[int]]:
    """Answers of the shared engine, one prompt at a time, nothing cached."""
    out = []
    for text in prompts(12):
        engine.flush()
        answer = engine.generate(text, 24, dp_rank=0)
        assert answer["meta_info"]["cached_tokens"] == 0
        out.append(answer["output_ids"])
    return out


def test_from_l1_alone_and_in_a_crowd(engine: Engine, computed: list[list[int]]) -> None:
    engine.flush()
    for _ in range(2):
        answers = together(engine, prompts(12))
        assert [a["output_ids"] for a in answers] == computed
    assert any(a["meta_info"]["cached_tokens_details"]["device"] for a in answers)


@pytest.mark.parametrize(
    "flags",
    [
        ("--l1-tokens", "1024", "--l2-tokens", "32768", "--chunk-tokens", "48"),
        ("--l1-tokens", "1024", "--l2-tokens", "32768", "--write-policy", "write_back", "--layout", "page_head"),
        ("--l1-tokens", "1024", "--l2-tokens", "1024", "--layout", "layer_first", "--max-running", "3"),
        ("--l1-tokens", "1024", "--l2-tokens", "32768", "--page-size", "64", "--layout", "page_first_direct"),
    ],
    ids=["small-chunks", "write-back", "tiny-l2", "large-pages"],
)
def test_from_l2_under_eviction(processes: Processes, computed: list[list[int]], flags: tuple[str, ...]) -> None:
    """L1 holds one or two prompts, so pages come and go; another process, other chunks, layouts and pages."""
    engine = processes.engine(None, *SMALL, *flags)
    first = together(engine, prompts(12))
    assert [a["output_ids"] for a in first] == computed
    alone = [engine.generate(text, 24) for text in prompts(12)]
    assert [a["output_ids"] for a in alone] == computed
    if "tiny-l2" not in flags and flags[3] != "1024":
        assert sum(a["meta_info"]["cached_tokens_details"]["host"] for a in alone) > 0
