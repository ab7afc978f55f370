"""Stand of ``hf3fs``, EMULATED: the USRBIO module of ``tests/rigs/usrbio`` over a directory that plays the mount."""

from pathlib import Path
from typing import Any

from tests.rigs.stores.base import Stand

ROOT = Path(__file__).resolve().parents[3]
USRBIO = ROOT / "tests" / "rigs" / "usrbio"
PAGE = 64 << 10


class Hf3fsStand(Stand):
    """See the module's text."""

    backend_name = "hf3fs"
    emulated = True
    why_whole = "pages have places in one file; torn ones and short requests are in unit/backends/test_hf3fs.py"
    can_be_small = True
    evicts_when_full = True

    @property
    def mount(self) -> Path:
        """What plays the 3FS mount."""
        return self.root / "mnt"

    def start(self) -> None:
        (self.mount / "3fs-virt" / "iovs").mkdir(parents=True, exist_ok=True)

    def config(self) -> dict[str, Any]:
        pages = self.small_pages if self.small else 4096
        return {
            "file_path_prefix": str(self.mount / "kv" / "rank"), "file_size": pages * (PAGE + 4096), "numjobs": 4,
            "entries": 8,
        }  # fmt: skip

    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT}:{USRBIO}"}


def stand_class(variant: str) -> type[Stand]:
    """The one there is."""
    return Hf3fsStand
