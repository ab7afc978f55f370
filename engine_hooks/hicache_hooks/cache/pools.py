"""L1 device pool and L2 host pool: the memory of KV pages. Who owns which page is the ledgers' business.

Device pages live per layer, as attention wants them. The host pool is one contiguous allocation (pinned where
there is a GPU); in the page-first layouts each page is one buffer ``payload | padding | trailer`` at a 4 KiB
aligned address, handed to stores without a copy. ``layer_first`` has no such buffer, so its pages go
through a few staging buffers, which are what a store gets to see and register.
"""

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PAGE_ALIGN, page_stride

STAGING_PAGES = 64  # layer_first only: bounds the copies in flight; four batches of the default size


class DevicePool:
    """Paged K and V of every layer on one device."""

    def __init__(self, geometry: KvGeometry, num_pages: int, device: str | torch.device = "cpu") -> None:
        """
        Raises:
            ValueError: less than one page.
        """
        if num_pages < 1:
            raise ValueError(f"bad_geometry: a device pool of {num_pages} pages")
        self.geometry = geometry
        self.num_pages = num_pages
        self.device = torch.device(device)
        g = geometry
        shape = (2, g.layers, num_pages, g.page_size, g.kv_heads, g.head_dim)
        self.data = torch.zeros(shape, dtype=g.dtype, device=self.device)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer, ``(tokens, heads, dim)``; slot = page * page_size + offset. A view."""
        return self.data[0, layer].flatten(0, 1)

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, as ``k``."""
        return self.data[1, layer].flatten(0, 1)

    def page(self, i: int) -> torch.Tensor:
        """Page ``i`` in canonical order ``(kv, layer, token, head, dim)``. A view."""
        return self.data[:, :, i]


class HostPool:
    """Host pages. ``page_bytes`` is the length of every page buffer that a store sees.

    ``pages`` is a view of all payloads in canonical order, ``(page, kv, layer, token, head, dim)``.
    """

    def __init__(self, geometry: KvGeometry, num_pages: int, *, pinned: bool = False) -> None:
        """
        Raises:
            ValueError: less than one page.
            RuntimeError: the memory cannot be had.
        """
        if num_pages < 1:
            raise ValueError(f"bad_geometry: a host pool of {num_pages} pages")
        self.geometry = geometry
        self.num_pages = num_pages
        self.pinned = pinned
        self.page_bytes = page_stride(geometry.payload_bytes)
        self._staging: Staging | None = None
        if geometry.contiguous_pages:
            self._buffers = _aligned(num_pages * self.page_bytes, pinned)
            self.pages = _payloads(self._buffers, geometry, num_pages, self.page_bytes)
        else:
            g = geometry
            raw = _aligned(num_pages * g.payload_bytes, pinned)
            whole = raw.view(g.dtype).view(2, g.layers, num_pages, g.page_size, g.kv_heads, g.head_dim)
            self.pages = whole.permute(2, 0, 1, 3, 4, 5)
            staged = min(STAGING_PAGES, num_pages)
            self._buffers = _aligned(staged * self.page_bytes, pinned)
            self._staging = Staging(_payloads(self._buffers, g, staged, self.page_bytes), staged)
        self._memory = memoryview(cast("Any", self._buffers.numpy()))

    def memory(self) -> memoryview:
        """Every byte that a store may be handed; what ``Backend.register`` gets."""
        return self._memory

    def page(self, i: int) -> torch.Tensor:
        """Payload of page ``i`` in canonical order ``(kv, layer, token, head, dim)``. A view."""
        return self.pages[i]

    def stored(self, i: int) -> torch.Tensor:
        """Payload of page ``i`` in the order of its bytes. A view, contiguous except in ``layer_first``."""
        return self.pages[i].permute(self.geometry.to_stored)

    def page_view(self, i: int) -> memoryview:
        """Page buffer ``i``, payload and trailer, without a copy.

        Raises:
            TypeError: ``layer_first`` has no such buffer; use ``buffers``.
            IndexError: no such page.
        """
        if self._staging is not None:
            raise TypeError("pages of layer_first are not contiguous: use buffers()")
        if not 0 <= i < self.num_pages:
            raise IndexError(f"page {i} of {self.num_pages}")
        return self._memory[i * self.page_bytes : (i + 1) * self.page_bytes]

    def buffers(self, pages: Sequence[int], timeout_s: float) -> "PageBuffers":
        """Page buffers for a transfer of ``pages`` (at most ``STAGING_PAGES``), to be released after it.

        Raises:
            TimeoutError: no staging buffers came free in time (``layer_first`` only).
            ValueError: more pages than there are staging buffers.
        """
        if self._staging is None:
            return PageBuffers(self, pages, [self.page_view(i) for i in pages], [])
        slots = self._staging.take(len(pages), timeout_s)
        step = self.page_bytes
        return PageBuffers(self, pages, [self._memory[s * step : (s + 1) * step] for s in slots], slots)


class Staging:
    """Contiguous buffers that pages of ``layer_first`` pass through."""

    def __init__(self, pages: torch.Tensor, slots: int) -> None:
        self.pages = pages
        self.slots = slots
        self._free = list(range(slots))
        self._changed = threading.Condition()

    def take(self, n: int, timeout_s: float) -> list[int]:
        """``n`` slots at once: taking one by one could deadlock two half-served batches."""
        if n > self.slots:
            raise ValueError(f"{n} pages at once, {self.slots} staging buffers")
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= n, timeout_s):
                raise TimeoutError(f"no {n} staging buffers free within {timeout_s} s")
            return [self._free.pop() for _ in range(n)]

    def give(self, slots: Sequence[int]) -> None:
        """Return slots."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()


class PageBuffers:
    """Buffers of one batch. ``pull`` before a store reads them, ``push`` after it filled them, then ``release``."""

    def __init__(self, pool: HostPool, pages: Sequence[int], views: list[memoryview], slots: list[int]) -> None:
        self.views = views
        self._pool = pool
        self._pages = pages
        self._slots = slots

    def pull(self) -> None:
        """Host pages -> buffers; nothing to do where they are the same bytes."""
        staging = self._pool._staging
        if staging is not None:
            for page, slot in zip(self._pages, self._slots, strict=True):
                staging.pages[slot].copy_(self._pool.page(page))

    def push(self, good: Sequence[bool]) -> None:
        """Buffers -> host pages, of those that are good."""
        staging = self._pool._staging
        if staging is not None:
            for page, slot, ok in zip(self._pages, self._slots, good, strict=True):
                if ok:
                    self._pool.page(page).copy_(staging.pages[slot])

    def release(self) -> None:
        """Give the staging buffers back. Idempotent."""
        if self._slots and self._pool._staging is not None:
            slots, self._slots = self._slots, []
            self._pool._staging.give(slots)


def _aligned(nbytes: int, pinned: bool) -> torch.Tensor:
    """Zeroed bytes at a 4 KiB aligned address. Zeroing takes the page faults now, not in the first transfers."""
    if pinned:
        raw = torch.empty(nbytes + PAGE_ALIGN, dtype=torch.uint8, pin_memory=True)
        shift = -raw.data_ptr() % PAGE_ALIGN
        return raw[shift : shift + nbytes].zero_()
    memory = mmap.mmap(-1, nbytes)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _payloads(buffers: torch.Tensor, geometry: KvGeometry, pages: int, stride: int) -> torch.Tensor:
    """The payloads of page buffers as one tensor ``(page, kv, layer, token, head, dim)``. A view."""
    flat = buffers.view(pages, stride)[:, : geometry.payload_bytes].view(geometry.dtype)
    stored = flat.view(pages, *geometry.stored_shape)
    return stored.permute(0, *(axis + 1 for axis in geometry.to_canonical))
