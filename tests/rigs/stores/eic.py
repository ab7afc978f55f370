"""Stand of ``eic``, a FAKE: the module of ``tests/rigs/eic_fake`` in the place of the closed client and its service."""

import hashlib
import os
from pathlib import Path
from typing import Any

from tests.rigs.stores.base import Stand

ROOT = Path(__file__).resolve().parents[3]
FAKE = ROOT / "tests" / "rigs" / "eic_fake"


class EicStand(Stand):
    """See the module's text."""

    backend_name = "eic"
    emulated = True
    why_not_small = "EMULATED: nobody here knows what the service says when it is full"
    can_clear = False  # the client has no call that lists keys

    def start(self) -> None:
        (self.root / "service").mkdir(exist_ok=True)

    def config(self) -> dict[str, Any]:
        yaml = {"remote_url": "eic://127.0.0.1:1", "eic_instance_id": "fake", "eic_log_dir": str(self.root / "log")}
        return {"config": yaml, "namespace": "hicache"}

    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT}:{FAKE}", "EIC_FAKE_ROOT": str(self.root / "service")}

    def shorten(self, key: str, namespace: str) -> bool:
        path = self.root / "service" / "ns-hicache" / hashlib.sha256(key.encode()).hexdigest()
        os.truncate(path, path.stat().st_size // 2)
        return True


def stand_class(variant: str) -> type[Stand]:
    """The one there is."""
    return EicStand
