"""What can go wrong with the state directory. All are ``internal`` to a client; ``details.reason`` tells them apart.

No message or detail ever carries record content: records hold secrets (failures.md F94).
"""

from pathlib import Path

from hicache_proto.errors import Internal


class StoreError(Internal):
    """Base class of everything that the state directory can raise."""


class StateDirUnsafe(StoreError):
    """The state directory cannot be used: not a directory, another owner, or open to others."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"state directory {path}: {why}",
            details={"reason": "state_dir", "path": str(path)},
            hint="name a directory of its own with --state-dir; it is kept at mode 0700",
        )


class StateDirLocked(StoreError):
    """Another daemon holds the state directory."""

    def __init__(self, path: Path, holder: str) -> None:
        by = f" by process {holder}" if holder else ""
        super().__init__(
            f"state directory {path} is in use{by}: one daemon per state directory",
            details={"reason": "state_dir_locked", "path": str(path), "pid": holder},
            hint="stop the other daemon, or give this one its own --state-dir and --runtime-dir",
        )


class JournalCorrupt(StoreError):
    """A record that was once complete does not verify. ``path`` and ``offset`` (bytes) say where."""

    def __init__(self, path: Path, offset: int, why: str) -> None:
        self.path, self.offset = path, offset
        super().__init__(
            f"journal {path} is damaged at byte {offset}: {why}",
            details={"reason": "journal_corrupt", "path": str(path), "offset": offset},
            hint="start once with --recover: the damaged part is kept beside it, and what the ranks prove is adopted",
        )


class JournalFull(StoreError):
    """No space for the record and the outcome that must follow it. Nothing happened; the file is as it was."""

    retryable = True

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"journal {path} cannot grow: {why}; nothing was changed",
            details={"reason": "disk_full", "path": str(path)},
            hint="free some space on the filesystem of the state directory, then repeat",
        )


class JournalGone(JournalFull):
    """The state directory was removed under the running daemon: what is written now, no start would find."""

    retryable = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, "its directory was removed")
        self.details["reason"] = "journal_gone"
        self.hint = "restart the daemon: it begins a new journal with what the ranks prove"


# ``details.reason`` where a record was refused and the operation never began.
NEVER_BEGAN = ("disk_full", "journal_gone")


class JournalFailed(StoreError):
    """A write or fsync failed: what is on disk is unknown until it is read again. The daemon must end its process.

    After a failed fsync the kernel may call the lost pages clean, so a second fsync proves nothing. Every later
    call of this journal raises the same error; the next start reads what is there and writes it anew.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"journal {path} failed: {why}; the recorded outcome is unknown until the next start",
            details={"reason": "journal_failed", "path": str(path)},
            hint="check the disk; the daemon ends and recovers at its next start",
        )
