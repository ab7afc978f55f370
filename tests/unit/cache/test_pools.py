"""Layouts and pools: bit-exact in every layout, page buffers without a copy where the layout allows it."""

import numpy as np
import pytest
import torch
from tests.unit.cache.support import PAGE, geometry

from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import PAGE_ALIGN, PageFormat
from hicache_hooks.cache.pools import STAGING_PAGES, DevicePool, HostPool
from hicache_hooks.cache.transfer import Copier, gather, pieces, scatter
from hicache_proto.model import LAYOUTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def _filled(g: KvGeometry, pages: int) -> DevicePool:
    pool = DevicePool(g, pages)
    raw = pool.data.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7)))
    return pool


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_over_a_store_is_bit_exact(layout: str, dtype: torch.dtype) -> None:
    g = geometry(layout, dtype=dtype)
    device, host = _filled(g, 6), HostPool(g, 8)
    before = [_bytes(device.page(i)) for i in range(6)]
    copier, form = Copier(device, host), PageFormat(g.payload_bytes, "ns")
    copier.to_host([0, 3, 5], [7, 1, 4], None)
    out = host.buffers([7, 1, 4], 1.0)
    out.pull()
    for view in out.views:
        form.seal(view, "k")
    stored = [bytes(view) for view in out.views]
    out.release()
    back = HostPool(g, 8)
    into = back.buffers([0, 2, 3], 1.0)
    for view, data in zip(into.views, stored, strict=True):
        view[:] = data
        assert form.check(view, "k") is None
    into.push([True, True, False])
    into.release()
    empty = DevicePool(g, 6)
    Copier(empty, back).to_device([1, 2], [0, 2], None)
    assert [_bytes(empty.page(1)), _bytes(empty.page(2))] == [before[0], before[3]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpu_way_of_copying_gives_the_same_bytes(layout: str) -> None:
    """Gather, contiguous pieces, scatter: what a GPU does, here on CPU tensors."""
    g = geometry(layout)
    device, plain, host = _filled(g, 6), HostPool(g, 8), HostPool(g, 8)
    Copier(device, plain).to_host([5, 0, 3], [1, 7, 2], None)
    packed = gather(device, [5, 0, 3])
    count = 0
    for to, piece in pieces(host, [1, 7, 2], packed):
        assert to.is_contiguous()
        assert piece.is_contiguous()
        to.copy_(piece)
        count += 1
    assert count == (3 * 2 * g.layers if layout == "layer_first" else 3)
    assert _bytes(host.pages) == _bytes(plain.pages)
    back = DevicePool(g, 6)
    again = torch.empty_like(packed)
    for of, piece in pieces(host, [7, 2], again[:2]):
        piece.copy_(of)
    scatter(back, [4, 1], again[:2])
    assert _bytes(back.page(4)) == _bytes(device.page(0))
    assert _bytes(back.page(1)) == _bytes(device.page(3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_a_page_are_in_the_documented_order(layout: str) -> None:
    """Positions are computed by hand here: (kv, layer, token, head, dim) = (1, 1, 2, 0, 3)."""
    g = KvGeometry(layers=2, kv_heads=3, head_dim=5, page_size=4, layout=layout)
    host = HostPool(g, 3)
    host.page(1)[1, 1, 2, 0, 3] = 42.0
    buffers = host.buffers([1], 1.0)
    buffers.pull()
    payload = np.frombuffer(buffers.views[0], dtype=np.float32)[: g.payload_bytes // 4]
    at = {
        "page_first": (((1 * 4 + 2) * 2 + 1) * 3 + 0) * 5 + 3,
        "page_first_direct": (((1 * 2 + 1) * 4 + 2) * 3 + 0) * 5 + 3,
        "page_head": (((1 * 3 + 0) * 4 + 2) * 2 + 1) * 5 + 3,
        "layer_first": (((1 * 2 + 1) * 4 + 2) * 3 + 0) * 5 + 3,
    }[layout]
    assert list(np.flatnonzero(payload)) == [at]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "layer_first"])
def test_page_views_are_the_pool_itself(layout: str) -> None:
    host = HostPool(geometry(layout), 4)
    whole = np.frombuffer(host.memory(), dtype=np.uint8)
    start = whole.__array_interface__["data"][0]
    assert start % PAGE_ALIGN == 0
    view = host.page_view(2)
    assert np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0] == start + 2 * host.page_bytes
    assert view.nbytes == host.page_bytes
    view[:4] = np.float32(1.5).tobytes()
    assert host.stored(2).flatten()[0] == 1.5
    assert host.stored(2).is_contiguous()
    with pytest.raises(IndexError):
        host.page_view(4)


def test_layer_first_is_staged_and_bounded() -> None:
    host = HostPool(geometry("layer_first"), 200)
    assert host.memory().nbytes == STAGING_PAGES * host.page_bytes
    with pytest.raises(TypeError, match="layer_first"):
        host.page_view(0)
    with pytest.raises(ValueError, match="staging"):
        host.buffers(range(STAGING_PAGES + 1), 0.0)
    held = host.buffers(range(STAGING_PAGES), 0.0)
    with pytest.raises(TimeoutError):
        host.buffers([0], 0.0)
    held.release()
    held.release()
    host.buffers([0], 0.0).release()
    assert len(host._staging._free) == STAGING_PAGES if host._staging else False


def test_device_views_share_the_pool() -> None:
    device = DevicePool(geometry(), 3)
    device.k(1)[PAGE + 1] = 7.0
    assert bool((device.page(1)[0, 1, 1] == 7.0).all())
    device.v(0)[0] = 3.0
    assert bool((device.page(0)[1, 0, 0] == 3.0).all())


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "page_size"])
def test_geometry_of_zero_is_refused(field: str) -> None:
    """F49: no ZeroDivision later."""
    with pytest.raises(ValueError, match=f"bad_geometry: {field}"):
        geometry(**{field: 0})
    with pytest.raises(ValueError, match="unknown layout"):
        geometry("pages")
    for pool in (DevicePool, HostPool):
        with pytest.raises(ValueError, match="bad_geometry"):
            pool(geometry(), 0)
