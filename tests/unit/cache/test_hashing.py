"""Names of pages: chained hashes and the namespace fingerprint."""

import dataclasses
import re

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cache.support import geometry

from hicache_hooks.cache.hashing import chain_hashes, fingerprint, page_key
from hicache_proto.model import LAYOUTS


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_a_chain_may_be_cut_anywhere(tokens: list[int], size: int) -> None:
    whole = chain_hashes(tokens, size)
    assert len(whole) == len(tokens) // size
    for cut in range(len(whole) + 1):
        head = chain_hashes(tokens[: cut * size], size)
        assert head + chain_hashes(tokens[cut * size :], size, head[-1] if head else b"") == whole


def test_equal_pages_after_different_prefixes_differ() -> None:
    assert chain_hashes([1, 2, 9, 9], 2)[1] != chain_hashes([3, 4, 9, 9], 2)[1]
    assert chain_hashes([9, 9], 2)[0] != chain_hashes([1, 2, 9, 9], 2)[1]


def test_everything_that_changes_the_bytes_changes_the_namespace() -> None:
    """F50: dtype, model, layout, page size, shape and rank map; not the data-parallel rank: replicas share pages."""
    base = geometry()
    names = {fingerprint("m", base), fingerprint("m2", base)}
    shapes = [dataclasses.replace(base, layout=name) for name in LAYOUTS if name != base.layout]
    shapes += [dataclasses.replace(base, dtype=torch.float16), dataclasses.replace(base, page_size=8)]
    shapes += [dataclasses.replace(base, **{f: 3}) for f in ("layers", "kv_heads", "head_dim")]
    names |= {fingerprint("m", g) for g in shapes}
    names |= {fingerprint("m", base, tp_rank=r, tp_size=2) for r in range(2)}
    names |= {fingerprint("m", base, pp_rank=r, pp_size=2) for r in range(2)}
    assert len(names) == 2 + len(shapes) + 4
    assert fingerprint("m", base) == fingerprint("m", geometry())


def test_keys_are_safe_names() -> None:
    key = page_key(fingerprint("m", geometry()), chain_hashes([1, 2], 2)[0])
    assert re.fullmatch(r"[0-9a-f]{32}\.[0-9a-f]{64}", key)
