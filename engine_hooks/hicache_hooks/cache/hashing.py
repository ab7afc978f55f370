"""Names of pages: the namespace fingerprint and the page-chained hash.

A page's hash covers its tokens and the hash of the page before it, so equal hashes mean equal prefixes. A key is
``<namespace>.<page hash>``: only ``[0-9a-f.]``, 97 characters. The fingerprint holds everything that gives the
same tokens other bytes (F50): two configurations can never read each other's pages.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from hicache_hooks.cache.layouts import KvGeometry
from hicache_hooks.cache.pages import FORMAT_VERSION

ROOT = b""  # the parent of a first page


def fingerprint(
    model: str,
    geometry: KvGeometry,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
) -> str:
    """32 hex digits naming everything that decides the bytes of a page.

    ``model`` identifies the weights exactly (name, revision or seed). Data-parallel replicas share pages, so
    dp is not in it; tensor- and pipeline-parallel ranks hold different parts of a page.
    """
    parts = (
        f"format={FORMAT_VERSION}",
        f"model={model}",
        f"dtype={geometry.dtype}",
        f"layout={geometry.layout}",
        f"shape={geometry.canonical_shape}",
        f"tp={tp_rank}/{tp_size}",
        f"pp={pp_rank}/{pp_size}",
    )
    h = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode()
        h.update(len(raw).to_bytes(4, "little") + raw)  # lengths: no two lists of parts run together
    return h.hexdigest()


def chain_hashes(tokens: Sequence[int], page_size: int, parent: bytes = ROOT) -> list[bytes]:
    """Hash of each full page of ``tokens``, which follow the page whose hash is ``parent`` (about 1 us a page)."""
    raw = array("I", tokens).tobytes()
    step = page_size * array("I").itemsize
    out: list[bytes] = []
    for start in range(0, len(raw) // step * step, step):
        parent = blake2b(raw[start : start + step], digest_size=32, key=parent[:64]).digest()
        out.append(parent)
    return out


def page_key(namespace: str, page_hash: bytes) -> str:
    """The key of a page in every store."""
    return f"{namespace}.{page_hash.hex()}"
