"""Placement of tokens in rows: position decides the row, nothing is placed twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_hooks.embedded.batch import KEY_TILE, ROWS, Span, key_span, place

spans = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(spans)
def test_every_token_sits_in_the_row_of_its_position(shapes: list[tuple[int, int]]) -> None:
    batch = [Span([0] * n, start, []) for start, n in shapes]
    placement = place(batch)
    seen: set[tuple[int, int]] = set()
    for index, span in enumerate(batch):
        positions = []
        for piece in (p for p in placement.pieces if p.span == index):
            assert piece.base % ROWS == 0
            for row in range(piece.lo, piece.hi):
                assert (piece.base + row) % ROWS == row
                assert (piece.block, row) not in seen
                seen.add((piece.block, row))
                positions.append(piece.base + row)
        assert positions == list(range(span.start, span.end))
    assert {block for block, _ in seen} == set(range(placement.blocks))


def test_decode_rows_share_a_block_unless_their_rows_meet() -> None:
    apart = [Span([0], p, []) for p in range(ROWS)]
    assert place(apart).blocks == 1
    meeting = [Span([0], p * ROWS, []) for p in range(3)]
    assert place(meeting).blocks == 3


def test_the_rows_of_an_aligned_block_read_equally_many_keys() -> None:
    for base in range(0, 4 * KEY_TILE, ROWS):
        assert len({key_span(base + row) for row in range(ROWS)}) == 1
        assert key_span(base + ROWS - 1) >= base + ROWS
