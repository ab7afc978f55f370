"""A file system of a few megabytes for a store that is to be full: ENOSPC is the kernel's. Needs root."""

import os
import subprocess
from pathlib import Path

MAY_MOUNT = os.geteuid() == 0


def mount(directory: Path, nbytes: int) -> None:
    """Make ``directory`` with ``nbytes`` of room."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(directory)], check=True)


def resize(directory: Path, nbytes: int) -> None:
    """More room, or less."""
    subprocess.run(["mount", "-o", f"remount,size={nbytes}", str(directory)], check=True)


def unmount(directory: Path) -> None:
    """Give the room back. Idempotent."""
    if os.path.ismount(directory):
        subprocess.run(["umount", "-l", str(directory)], check=True)
