"""Copies between L1 and L2 on a transfer thread: CUDA streams and events on a GPU, plain copies without.

On a GPU pages are gathered into (or scattered from) one contiguous device buffer in the host's byte order, so
that each page is one asynchronous copy from or to pinned memory; the permutation runs on the GPU. The thread
waits for its stream; the scheduler learns by the inbox and never waits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hicache_hooks.cache.pools import DevicePool, HostPool

# Pages per device buffer: 64 MiB at 1 MiB a page, enough to keep the bus busy.
GATHER_PAGES = 64
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copier:
    """Copies of one direction; owns a stream on a GPU. Used by one thread at a time."""

    def __init__(self, device: DevicePool, host: HostPool) -> None:
        self._device = device
        self._host = host
        self._cuda = device.device.type == "cuda"
        self._stream = torch.cuda.Stream(device.device) if self._cuda else None  # type: ignore[no-untyped-call]
        if not self._cuda:
            # numpy instead of Tensor.copy_: torch would start an OpenMP team for every transfer thread.
            ints = _INTS[device.geometry.dtype.itemsize]
            self._device_pages = device.data.view(ints).numpy().transpose(2, 0, 1, 3, 4, 5)
            self._host_pages = host.pages.view(ints).numpy()

    def mark(self) -> Any:
        """*scheduler*: the point in the compute stream after which a copy may start; None on CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device.device))
        return event

    def to_host(self, device_pages: Sequence[int], host_pages: Sequence[int], after: Any) -> None:
        """Device pages -> host pages; returns when the bytes are there."""
        if self._stream is None:
            for d, h in zip(device_pages, host_pages, strict=True):
                np.copyto(self._host_pages[h], self._device_pages[d])
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for first in range(0, len(device_pages), GATHER_PAGES):
                packed = gather(self._device, device_pages[first : first + GATHER_PAGES])
                for host, piece in pieces(self._host, host_pages[first : first + GATHER_PAGES], packed):
                    host.copy_(piece, non_blocking=True)
                self._wait()  # before ``packed`` goes back to the allocator

    def to_device(self, device_pages: Sequence[int], host_pages: Sequence[int], after: Any) -> None:
        """Host pages -> device pages; returns when the bytes are there."""
        if self._stream is None:
            for d, h in zip(device_pages, host_pages, strict=True):
                np.copyto(self._device_pages[d], self._host_pages[h])
            return
        geometry = self._device.geometry
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for first in range(0, len(device_pages), GATHER_PAGES):
                pages = host_pages[first : first + GATHER_PAGES]
                shape = (len(pages), *geometry.stored_shape)
                packed = torch.empty(shape, dtype=geometry.dtype, device=self._device.device)
                for host, piece in pieces(self._host, pages, packed):
                    piece.copy_(host, non_blocking=True)
                scatter(self._device, device_pages[first : first + GATHER_PAGES], packed)
                self._wait()

    def _wait(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()


def gather(device: DevicePool, pages: Sequence[int]) -> torch.Tensor:
    """Device pages as one contiguous tensor, each in the order of the host's bytes."""
    found = device.data[:, :, _index(device, pages)].permute(2, 0, 1, 3, 4, 5)
    return found.permute(0, *(axis + 1 for axis in device.geometry.to_stored)).contiguous()


def scatter(device: DevicePool, pages: Sequence[int], packed: torch.Tensor) -> None:
    """The way back."""
    canonical = packed.permute(0, *(axis + 1 for axis in device.geometry.to_canonical))
    device.data[:, :, _index(device, pages)] = canonical.permute(1, 2, 0, 3, 4, 5)


def pieces(host: HostPool, pages: Sequence[int], packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal contiguous runs: one a page, in ``layer_first`` one for K and V of each layer."""
    for i, page in enumerate(pages):
        stored = host.stored(page)
        if stored.is_contiguous():
            yield stored, packed[i]
        else:
            yield from zip(stored.flatten(0, 1), packed[i].flatten(0, 1), strict=True)


def _index(device: DevicePool, pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.long, device=device.device)
