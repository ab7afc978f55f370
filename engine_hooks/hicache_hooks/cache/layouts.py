"""The four host layouts of a KV page, and the sizes that follow from a model's shape.

The canonical index order of one page is ``(kv, layer, token, head, dim)`` with kv = 0 for K, 1 for V. Bytes of a
page in host memory, slowest index first:

=================== ===================================== ==================================================
layout              order inside one page                 one page is one contiguous buffer
=================== ===================================== ==================================================
page_first          kv, token, layer, head, dim           yes
page_first_direct   kv, layer, token, head, dim           yes
page_head           kv, head, token, layer, dim           yes
layer_first         kv, layer, token, head, dim           no: the pool is (kv, layer, page, token, head, dim), so a
                                                          page is ``2 * layers`` pieces and is staged for a store
=================== ===================================== ==================================================

The orders are SGLang's with the page index pulled to the front, so that payload and trailer of a page are
neighbours. The staging form of ``layer_first`` is that of ``page_first_direct``.
"""

from dataclasses import dataclass

import torch

from hicache_proto.model import LAYOUTS

CANONICAL = ("kv", "layer", "token", "head", "dim")
ORDERS: dict[str, tuple[str, ...]] = {
    "page_first": ("kv", "token", "layer", "head", "dim"),
    "page_first_direct": CANONICAL,
    "page_head": ("kv", "head", "token", "layer", "dim"),
    "layer_first": CANONICAL,
}


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of the KV cache of one rank.

    Raises:
        ValueError: a size below one, or an unknown layout (F49).
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype = torch.float32
    layout: str = "page_first"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"bad_geometry: {name} must be at least 1, is {getattr(self, name)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known are {', '.join(LAYOUTS)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page without its trailer."""
        return self.token_bytes * self.page_size

    @property
    def canonical_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a page in canonical index order."""
        return (2, self.layers, self.page_size, self.kv_heads, self.head_dim)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a page in the order of its bytes."""
        return tuple(self.canonical_shape[CANONICAL.index(axis)] for axis in ORDERS[self.layout])

    @property
    def to_canonical(self) -> tuple[int, ...]:
        """Permutation that turns a stored page into canonical order."""
        order = ORDERS[self.layout]
        return tuple(order.index(axis) for axis in CANONICAL)

    @property
    def to_stored(self) -> tuple[int, ...]:
        """Permutation that turns a canonical page into the order of its bytes."""
        return tuple(CANONICAL.index(axis) for axis in ORDERS[self.layout])

    @property
    def contiguous_pages(self) -> bool:
        """True when a page is one buffer in the pool: stores can use it without a copy."""
        return self.layout != "layer_first"
