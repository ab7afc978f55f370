"""The model's floats depend on a token's prefix alone: bit for bit, whatever the chunks, the batch and the pages."""

import random
from collections.abc import Iterator

import pytest
import torch

from hicache_hooks.cache.pools import DevicePool
from hicache_hooks.embedded.batch import KEY_TILE, ROWS, Span
from hicache_hooks.embedded.model import Model
from hicache_hooks.embedded.options import ModelShape

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, seed=7)
PAGES = 96


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE, context=512, page_size=16)


def pool_of(model: Model) -> DevicePool:
    pool = DevicePool(model.geometry("page_first"), PAGES)
    # Left-overs of other requests, and worse: nothing outside a request's own tokens may reach its floats.
    pool.data.fill_(float("nan"))
    return pool


def text(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


def kv_of(pool: DevicePool, pages: list[int], tokens: int) -> torch.Tensor:
    return pool.data[:, :, pages].flatten(2, 3)[:, :, :tokens]


def prefill(model: Model, pool: DevicePool, tokens: list[int], pages: list[int], cuts: list[int]) -> int:
    start, token = 0, None
    for end in [*cuts, len(tokens)]:
        (token,) = model.forward([Span(tokens[start:end], start, pages, sample=True)], pool)
        start = end
    assert token is not None
    return token


def generate(model: Model, pool: DevicePool, tokens: list[int], pages: list[int], count: int) -> list[int]:
    out = [prefill(model, pool, tokens, pages, [])]
    while len(out) < count:
        at = len(tokens) + len(out) - 1
        (token,) = model.forward([Span([out[-1]], at, pages, sample=True)], pool)
        assert token is not None
        out.append(token)
    return out


@pytest.mark.parametrize("cuts", [[1], [15], [16], [17], [100, 200], [7, 8, 9, 255, 256, 257], list(range(1, 300, 13))])
def test_chunking_changes_no_bit(model: Model, cuts: list[int]) -> None:
    tokens = text(1, 300)
    whole, cut = pool_of(model), pool_of(model)
    pages, others = list(range(20)), list(range(40, 20, -1))
    assert prefill(model, whole, tokens, pages, []) == prefill(model, cut, tokens, others, cuts)
    assert torch.equal(kv_of(whole, pages, 300), kv_of(cut, others, 300))


def test_decoding_and_prefilling_the_same_tokens_give_the_same_bits(model: Model) -> None:
    """A second turn reuses pages that the first turn's decoding wrote."""
    tokens = text(2, 50)
    decoded, prefilled = pool_of(model), pool_of(model)
    pages = list(range(10))
    answer = generate(model, decoded, tokens, pages, 100)
    again = tokens + answer[:-1]
    assert prefill(model, prefilled, again, pages, []) == answer[-1]
    assert torch.equal(kv_of(decoded, pages, len(again)), kv_of(prefilled, pages, len(again)))


@pytest.mark.parametrize("order", range(4))
def test_the_batch_around_a_request_changes_no_bit(model: Model, order: int) -> None:
    """Six requests of odd lengths, prefilled and decoded together in shuffled orders, against each one alone."""
    prompts = [text(10 + i, n) for i, n in enumerate((5, 16, 33, 100, 130, 259))]
    tables, page = [], 0
    for prompt in prompts:
        need = (len(prompt) + 8) // 16 + 1
        tables.append(list(range(page, page + need)))
        page += need
    alone = pool_of(model)
    expected = [generate(model, alone, p, t, 8) for p, t in zip(prompts, tables, strict=True)]
    together = pool_of(model)
    rng = random.Random(order)
    outs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(len(out) < 8 for out in outs):
        ids = [i for i, out in enumerate(outs) if len(out) < 8 and rng.random() < 0.7] or [0]
        ids = [i for i in ids if len(outs[i]) < 8]
        rng.shuffle(ids)
        batch = []
        for i in ids:
            full = prompts[i] + outs[i]
            end = min(done[i] + rng.randrange(1, 90), len(full)) if done[i] < len(prompts[i]) else len(full)
            batch.append(Span(full[done[i] : end], done[i], tables[i], sample=end == len(full)))
            done[i] = end
        if not batch:
            continue
        for i, token in zip(ids, model.forward(batch, together), strict=True):
            if token is not None:
                outs[i].append(token)
    assert outs == expected
    for prompt, table, out in zip(prompts, tables, outs, strict=True):
        n = len(prompt) + len(out) - 1
        assert torch.equal(kv_of(alone, table, n), kv_of(together, table, n))


@pytest.mark.parametrize("page_size", [1, 5, 48, 64])
def test_the_page_size_changes_no_token(model: Model, page_size: int) -> None:
    tokens = text(3, 270)
    other = Model(SHAPE, context=512, page_size=page_size)
    pool = DevicePool(other.geometry("page_first"), 512 // page_size)
    pages = list(range(512 // page_size))
    random.Random(4).shuffle(pages)
    assert generate(other, pool, tokens, pages, 20) == generate(model, pool_of(model), tokens, list(range(20)), 20)


def test_the_output_depends_on_every_page(model: Model) -> None:
    """Teeth of every equality test here and above: a wrong page of context shows in the output."""
    tokens = text(5, 160)
    pages = list(range(12))
    pool = pool_of(model)
    expected = generate(model, pool, tokens, pages, 24)
    seen = 0
    for page in range(10):
        damaged = pool_of(model)
        prefill(model, damaged, tokens, pages, [])
        damaged.data[:, :, page] = damaged.data[:, :, (page + 3) % 10]
        out = []
        token, at = tokens[-1], len(tokens) - 1
        for _ in expected:
            (token,) = model.forward([Span([token], at, pages, sample=True)], damaged)  # type: ignore[list-item]
            out.append(token)
            at += 1
        seen += out != expected
    assert seen == 10


def test_every_product_has_the_shape_that_its_positions_say(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself, because a BLAS may happen to round alike for other shapes: equal bits here prove it nowhere."""
    rows: set[int] = set()
    keys: list[int] = []
    mm, bmm = torch.mm, torch.bmm

    def seen_mm(a: torch.Tensor, b: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        rows.add(a.shape[0])
        return mm(a, b, **out)

    def seen_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape[1] == ROWS * SHAPE.heads // SHAPE.kv_heads
        keys.append(max(a.shape[2], b.shape[2]))
        return bmm(a, b)

    monkeypatch.setattr(torch, "mm", seen_mm)
    monkeypatch.setattr(torch, "bmm", seen_bmm)
    pool = pool_of(model)
    long, short = text(6, 300), text(7, 5)
    model.forward([Span(long, 0, list(range(20)), sample=True), Span(short, 0, [20], sample=True)], pool)
    assert rows == {ROWS}
    assert set(keys) == {KEY_TILE, 2 * KEY_TILE}
    keys.clear()
    model.forward([Span([1], 299, list(range(20)), sample=True)], pool)
    assert set(keys) == {2 * KEY_TILE}
    assert rows == {ROWS}


def test_weights_come_from_the_seed_alone(model: Model) -> None:
    assert Model(SHAPE, context=512, page_size=16).identity() == model.identity()
    others = [
        ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, seed=8),
        ModelShape(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, seed=7),
    ]
    assert len({model.identity(), *(Model(s, context=512, page_size=16).identity() for s in others)}) == 3


@pytest.mark.parametrize("bad", [{"heads": 3}, {"hidden": 40}, {"layers": 0}, {"head_dim": 0}, {"seed": -1}])
def test_impossible_shapes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="--"):
        Model(ModelShape(**bad), context=64, page_size=16)
