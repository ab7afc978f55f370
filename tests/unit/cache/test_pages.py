"""Page trailer: sealing, checking, and that every kind of wrong page is told apart."""

import pytest

from hicache_hooks.cache.pages import PAGE_ALIGN, TRAILER_BYTES, PageFormat, page_stride

PAYLOAD = 5000


def _sealed(key: str = "k", namespace: str = "ns") -> tuple[PageFormat, bytearray]:
    form = PageFormat(PAYLOAD, namespace)
    page = bytearray(i % 251 for i in range(form.page_bytes))
    form.seal(memoryview(page), key)
    return form, page


@pytest.mark.parametrize("payload", [1, PAGE_ALIGN - TRAILER_BYTES, PAGE_ALIGN, 1 << 20])
def test_stride_holds_payload_and_trailer(payload: int) -> None:
    stride = page_stride(payload)
    assert stride % PAGE_ALIGN == 0
    assert payload + TRAILER_BYTES <= stride < payload + TRAILER_BYTES + PAGE_ALIGN


def test_a_sealed_page_passes_and_keeps_its_payload() -> None:
    form, page = _sealed()
    assert form.check(memoryview(page), "k") is None
    assert page[:PAYLOAD] == bytes(i % 251 for i in range(PAYLOAD))


@pytest.mark.parametrize("at", [0, PAYLOAD // 2, PAYLOAD - 1])
def test_a_flipped_bit_in_the_payload_is_found(at: int) -> None:
    form, page = _sealed()
    page[at] ^= 1
    assert form.check(memoryview(page), "k") == "checksum"


@pytest.mark.parametrize("offset", range(TRAILER_BYTES))
def test_a_flipped_bit_anywhere_in_the_trailer_is_found(offset: int) -> None:
    form, page = _sealed()
    page[len(page) - TRAILER_BYTES + offset] ^= 0x10
    assert form.check(memoryview(page), "k") is not None


def test_each_wrong_page_has_its_reason() -> None:
    """F50: another namespace's page is never taken for ours."""
    form, page = _sealed()
    view = memoryview(page)
    assert form.check(view, "other") == "key"
    assert PageFormat(PAYLOAD, "other").check(view, "k") == "fingerprint"
    assert PageFormat(PAYLOAD - 1, "ns").check(view, "k") == "payload length"
    assert form.check(view[:-1], "k") == "length"
    assert form.check(memoryview(bytes(form.page_bytes)), "k") == "magic"
    page[-TRAILER_BYTES + 8] = 99
    assert form.check(view, "k") == "version"


def test_bad_sizes_are_refused() -> None:
    """F49."""
    with pytest.raises(ValueError, match="bad_geometry"):
        PageFormat(0, "ns")
    with pytest.raises(ValueError, match="page buffer"):
        PageFormat(PAYLOAD, "ns").seal(memoryview(bytearray(PAYLOAD)), "k")
