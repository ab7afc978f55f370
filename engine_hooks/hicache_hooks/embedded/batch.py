"""Which token goes to which row: the placement that makes the model's floats independent of the batch.

A matrix product in floating point depends on its shape, and inside one shape possibly on the row's place (edge
kernels). So every product of the model has ``ROWS`` rows, always, and the token at position p of its request always
sits in row ``p % ROWS``. What is left of a batch is *which* rows stand in the other places, and rows of a
product do not mix. The number of keys that attention reads is a function of p too (``key_span``). Hence the KV of
a token depends on its prefix alone: not on how prefill was cut, what else ran, or whether it was a prompt or an
answer token. That equality is what lets KV from L1, L2 and L3 replace computed KV without changing one output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROWS = 16  # rows of every matrix product; 16 measured fastest per token for decode and prefill alike
KEY_TILE = 256  # attention reads keys in multiples of this many; a multiple of ROWS


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one request to compute: positions ``start``.. with the page table of its context."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool = False  # choose the token that follows the last one

    @property
    def end(self) -> int:
        """Tokens of context after this span."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a span that falls into one block: rows ``lo`` to ``hi`` are positions ``base + lo`` .."""

    span: int
    block: int
    base: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All spans of a pass in blocks of ``ROWS`` rows."""

    blocks: int
    pieces: list[Piece]


def key_span(position: int) -> int:
    """Keys that attention reads for the token at ``position``: the same for all rows of an aligned block."""
    return (position // KEY_TILE + 1) * KEY_TILE


def place(spans: Sequence[Span]) -> Placement:
    """Put every token into row ``position % ROWS`` of some block; partial pieces share blocks where rows are free."""
    used: list[int] = []  # per block, a bit mask of its rows
    first_open = 0
    pieces: list[Piece] = []
    for index, span in enumerate(spans):
        position = span.start
        while position < span.end:
            base = position - position % ROWS
            lo, hi = position - base, min(span.end - base, ROWS)
            mask = (1 << hi) - (1 << lo)
            block = next((b for b in range(first_open, len(used)) if not used[b] & mask), len(used))
            if block == len(used):
                used.append(0)
            used[block] |= mask
            while first_open < len(used) and used[first_open] == (1 << ROWS) - 1:
                first_open += 1
            pieces.append(Piece(index, block, base, lo, hi))
            position = base + hi
    return Placement(len(used), pieces)
