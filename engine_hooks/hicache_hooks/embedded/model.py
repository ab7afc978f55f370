"""A small decoder-only transformer on paged KV, whose floats depend on a token's prefix alone (see ``batch``).

RMSNorm, rotary positions, grouped-query attention, SwiGLU; bytes as tokens; weights drawn from a seed, so that any
two processes with the same options hold the same model. Everything that *reduces* (products, norms, softmax) runs in
blocks of fixed shape; only element-wise work runs over a whole pass. K and V go straight into the
device pool and are read back from it by page table, so computed and fetched pages take the same way.

One instance belongs to one thread.
"""

import math
from collections.abc import Sequence

import torch
import xxhash

from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pools import DevicePool
from hicache_hooks.embedded.batch import KEY_TILE, ROWS, Piece, Span, key_span, place
from hicache_hooks.embedded.options import VOCABULARY, ModelShape

EPSILON = 1e-6
ROPE_BASE = 10_000.0
# Random keys and queries give flat attention, in which a wrong page would hardly show. Sharper scores make every
# output depend on its context, as a trained model's do (the tests that damage a page rely on it).
SHARPNESS = 3.0
MODEL_VERSION = 1  # raise when the arithmetic changes: old pages then belong to another model


class Model:
    """Weights and the forward pass."""

    def __init__(self, shape: ModelShape, *, context: int, page_size: int, device: str = "cpu") -> None:
        """
        Raises:
            ValueError: sizes that do not fit together.
        """
        shape.check()
        self.shape = shape
        self.page_size = page_size
        self.context = -(-context // KEY_TILE) * KEY_TILE
        self.device = torch.device(device)
        self._draw()
        self._tables()
        # Contexts are gathered here, from row 0: slices of it have the same strides and alignment for every length.
        pages = -(-self.context // page_size)
        self._k = torch.zeros(pages * page_size, shape.kv_heads, shape.head_dim, device=self.device)
        self._v = torch.zeros_like(self._k)

    def geometry(self, layout: str) -> KvGeometry:
        """Shape of this model's KV cache."""
        s = self.shape
        return KvGeometry(s.layers, s.kv_heads, s.head_dim, self.page_size, torch.float32, layout)

    def identity(self) -> str:
        """Names the weights and the arithmetic exactly; part of the namespace fingerprint (F50).

        The kind of device is in it: two kinds round differently, so they must not share pages.
        """
        s = self.shape
        digest = xxhash.xxh3_64()
        for weight in (self._embed, self._head, *self._qkv, *self._out, *self._up, *self._down):
            digest.update(weight.cpu().numpy().tobytes())
        sizes = f"{s.layers}x{s.hidden}x{s.heads}x{s.kv_heads}x{s.head_dim}x{s.mlp}"
        return f"hicache-embedded/{MODEL_VERSION}/{sizes}/{digest.hexdigest()}/{self.device.type}"

    def forward(self, spans: Sequence[Span], pool: DevicePool) -> list[int | None]:
        """Compute the spans' tokens: their K and V are in ``pool`` afterwards.

        Returns:
            Per span the most likely next token, None where ``sample`` is off.
        """
        with torch.inference_mode():
            return self._forward(spans, pool)

    # ------------------------------------------------------------------ weights

    def _draw(self) -> None:
        s = self.shape
        generator = torch.Generator("cpu").manual_seed(s.seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            return (drawn / math.sqrt(rows)).to(self.device)

        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self._embed = torch.randn(VOCABULARY, s.hidden, generator=generator, dtype=torch.float32).to(self.device)
        self._qkv: list[torch.Tensor] = []
        self._out: list[torch.Tensor] = []
        self._up: list[torch.Tensor] = []
        self._down: list[torch.Tensor] = []
        for _ in range(s.layers):  # the norms' gains are part of the matrices that follow them
            self._qkv.append(matrix(s.hidden, q + 2 * kv))
            self._out.append(matrix(q, s.hidden))
            self._up.append(matrix(s.hidden, 2 * s.mlp))
            self._down.append(matrix(s.mlp, s.hidden))
        self._head = matrix(s.hidden, VOCABULARY)

    def _tables(self) -> None:
        dim = self.shape.head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = torch.outer(torch.arange(self.context, dtype=torch.float64), ROPE_BASE**-steps)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).float().to(self.device)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).float().to(self.device)
        # One causal mask for all blocks: the block at ``base`` reads its columns ``context - base`` and on, where
        # column ``context + r`` is the last key that row r may see.
        columns = torch.arange(2 * self.context).unsqueeze(0)
        hidden = columns > self.context + torch.arange(ROWS).unsqueeze(1)
        self._mask = torch.zeros(ROWS, 2 * self.context).masked_fill(hidden, -math.inf).to(self.device)

    # ------------------------------------------------------------------ forward pass

    def _forward(self, spans: Sequence[Span], pool: DevicePool) -> list[int | None]:
        s = self.shape
        q_width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        placement = place(spans)
        pieces, count = placement.pieces, placement.blocks
        x, row_index, slot_index, cos, sin = self._inputs(spans, pieces, count)
        tables = [self._index(span.pages[: -(-span.end // self.page_size)]) for span in spans]
        qkv = x.new_zeros(count, ROWS, q_width + 2 * kv_width)
        mixed = x.new_zeros(count, ROWS, q_width)
        up = x.new_zeros(count, ROWS, 2 * s.mlp)
        for layer in range(s.layers):
            for b in range(count):
                torch.mm(_norm(x[b]), self._qkv[layer], out=qkv[b])
            rows = qkv.view(count * ROWS, -1)
            q, k, v = rows[:, :q_width], rows[:, q_width:-kv_width], rows[:, -kv_width:]
            q = _rotate(q.view(-1, s.heads, s.head_dim), cos, sin) * (SHARPNESS / math.sqrt(s.head_dim))
            k = _rotate(k.view(-1, s.kv_heads, s.head_dim), cos, sin)
            pool.k(layer).index_copy_(0, slot_index, k[row_index])
            pool.v(layer).index_copy_(0, slot_index, v.view(-1, s.kv_heads, s.head_dim)[row_index])
            q = q.view(count, ROWS, s.heads, s.head_dim)
            gathered = -1
            for piece in pieces:  # pieces of one span are neighbours: its context is gathered once per layer
                if piece.span != gathered:
                    gathered = piece.span
                    self._gather(pool, layer, tables[gathered], spans[gathered].end)
                out = self._attend(q[piece.block], piece.base)
                mixed[piece.block, piece.lo : piece.hi] = out[piece.lo : piece.hi]
            for b in range(count):
                x[b] += torch.mm(mixed[b], self._out[layer])
                torch.mm(_norm(x[b]), self._up[layer], out=up[b])
            act = torch.nn.functional.silu(up[..., : s.mlp]) * up[..., s.mlp :]
            for b in range(count):
                x[b] += torch.mm(act[b], self._down[layer])
        return self._choose(spans, pieces, x)

    def _inputs(
        self, spans: Sequence[Span], pieces: Sequence[Piece], count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embedded rows; which rows are tokens and which slot of the pool each belongs to; rotary factors."""
        tokens = [0] * (count * ROWS)
        positions = [0] * (count * ROWS)
        rows: list[int] = []
        slots: list[int] = []
        for piece in pieces:
            span = spans[piece.span]
            for r in range(piece.lo, piece.hi):
                row, position = piece.block * ROWS + r, piece.base + r
                tokens[row], positions[row] = span.tokens[position - span.start], position
                page, offset = divmod(position, self.page_size)
                rows.append(row)
                slots.append(span.pages[page] * self.page_size + offset)
        where = self._index(positions)
        x = self._embed[self._index(tokens)].view(count, ROWS, self.shape.hidden)
        return x, self._index(rows), self._index(slots), self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)

    def _gather(self, pool: DevicePool, layer: int, table: torch.Tensor, tokens: int) -> None:
        """Copy a context's K and V together. What follows is zeroed: left-overs of a page may be anything."""
        filled = len(table) * self.page_size
        padded = key_span(tokens - 1)
        for source, target in ((pool.k(layer), self._k), (pool.v(layer), self._v)):
            pages = source.view(pool.num_pages, -1)
            torch.index_select(pages, 0, table, out=target[:filled].view(len(table), -1))
            target[tokens : max(filled, padded)] = 0

    def _attend(self, q: torch.Tensor, base: int) -> torch.Tensor:
        """One block against the gathered context: ``(ROWS, heads, dim)`` to ``(ROWS, heads * dim)``."""
        s = self.shape
        keys, group = key_span(base), s.heads // s.kv_heads
        q = q.view(ROWS, s.kv_heads, group, s.head_dim).permute(1, 2, 0, 3).reshape(s.kv_heads, -1, s.head_dim)
        scores = torch.bmm(q, self._k[:keys].permute(1, 2, 0)).view(s.kv_heads, group, ROWS, keys)
        scores += self._mask[:, self.context - base : self.context - base + keys]
        weights = torch.softmax(scores, -1).view(s.kv_heads, -1, keys)
        out = torch.bmm(weights, self._v[:keys].permute(1, 0, 2))
        return out.view(s.kv_heads, group, ROWS, s.head_dim).permute(2, 0, 1, 3).reshape(ROWS, -1)

    def _choose(self, spans: Sequence[Span], pieces: Sequence[Piece], x: torch.Tensor) -> list[int | None]:
        last = {piece.span: piece for piece in pieces}
        picks = [(i, last[i]) for i, span in enumerate(spans) if span.sample]
        chosen: list[int | None] = [None] * len(spans)
        logits = {b: torch.mm(_norm(x[b]), self._head).argmax(-1) for b in sorted({p.block for _, p in picks})}
        values = {b: t.tolist() for b, t in logits.items()}
        for i, piece in picks:
            chosen[i] = int(values[piece.block][piece.hi - 1])
        return chosen

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of ``(rows, heads, dim)``."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
