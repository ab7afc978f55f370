"""What was decided and when: a desired state, the rows of the history. Part of ``api``, where everybody gets them."""

import msgspec


class DesiredState(msgspec.Struct, frozen=True):
    """Desired state with secrets redacted."""

    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None
    revision: int = 0


class RevisionDocument(msgspec.Struct, frozen=True):
    """One row of the history. ``target`` is what the operation aimed at, ``revision`` what holds after it: of one that
    did not commit, the revision before. The phases' times are those of a committed operation."""

    revision: int
    operation_id: str
    kind: str
    result: str  # "committed", "rolled_back", "adopted", "checked" (a dry run that passed)
    actor: str
    reason: str
    at: str
    target: DesiredState
    duration_ms: float = 0.0
    message: str = ""
    n: int = 0  # the operation's number
    mode: str = ""
    began_at: str = ""
    prepare_ms: float = 0.0
    freeze_ms: float = 0.0
    commit_ms: float = 0.0


class HistoryDocument(msgspec.Struct, frozen=True):
    """GET /hicache/history, oldest first."""

    revisions: list[RevisionDocument]
