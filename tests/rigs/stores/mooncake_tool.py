"""Another process at a Mooncake master: contributes memory, or replaces an object by one of another length."""

import json
import os
import sys
import threading
from typing import Any


def client(master: str, segment: int) -> Any:
    """A client of ``mooncake``, without ours in between."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master)
    if code:
        raise SystemExit(f"setup failed with {code}")
    return store


def contribute(master: str, nbytes: int) -> None:
    """Until killed."""
    store = client(master, nbytes)
    print("mounted", flush=True)
    threading.Event().wait()
    del store


def replace(master: str, key: str, percent: int) -> None:
    """Another length of the object's bytes under the same key."""
    store = client(master, 0)
    whole = bytes(store.get(key))
    if not whole:
        raise SystemExit("no such object")
    other = (whole * 2)[: len(whole) * percent // 100]
    codes = [store.remove(key, True), store.put(key, other)]
    if codes != [0, 0] or store.get_size(key) != len(other):
        raise SystemExit(f"{codes}")


def main() -> None:
    """``DO JSON``; ends without closing, which would take seconds."""
    do, fields = sys.argv[1], json.loads(sys.argv[2])
    {"contribute": contribute, "replace": replace}[do](**fields)
    os._exit(0)


if __name__ == "__main__":
    main()
