"""Copies between L1 and L2 on a transfer thread: CUDA streams and events on a GPU, plain copies without.

On a GPU pages are gathered into (or scattered from) one contiguous device buffer in the host's byte order, so
that each page is one asynchronous copy from or to pinned memory; the permutation runs on the GPU. The thread
waits for its stream; the scheduler learns by the inbox and never waits.
"""

from collections.abc import Sequence
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
                index = self._index(device_pages[first : first + GATHER_PAGES])
                packed = self._device.data[:, :, index].permute(2, 0, 1, 3, 4, 5)
                packed = packed.permute(self._to_stored()).contiguous()
                for i, page in enumerate(host_pages[first : first + GATHER_PAGES]):
                    self._host.stored(page).copy_(packed[i], non_blocking=True)
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
                for i, page in enumerate(pages):
                    packed[i].copy_(self._host.stored(page), non_blocking=True)
                canonical = packed.permute(0, *(axis + 1 for axis in geometry.to_canonical))
                index = self._index(device_pages[first : first + GATHER_PAGES])
                self._device.data[:, :, index] = canonical.permute(1, 2, 0, 3, 4, 5)
                self._wait()

    def _to_stored(self) -> tuple[int, ...]:
        return (0, *(axis + 1 for axis in self._device.geometry.to_stored))

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.long, device=self._device.device)

    def _wait(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()
