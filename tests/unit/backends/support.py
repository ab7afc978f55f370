"""What the tests of the attach/detach box share: facts, targets, and a storage set that records its life."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_hooks.cache.attachment import Parked, PoolFacts, StorageAttachment
from hicache_hooks.cache.config import Running
from hicache_hooks.cache.knobs import Knobs
from hicache_hooks.cache.pages import PageFormat
from hicache_hooks.guard import Guard
from hicache_proto.model import TargetState

FORMAT = PageFormat(8000, "ns")
FACTS = PoolFacts(
    layout="page_first", page_size=16, page_bytes=FORMAT.page_bytes, l2_tokens=1024, namespace="ns", hot=True
)
CLASSES = ("BK", "EpochBK", "RegisteringBK", "PageFirstBK", "NoManifestBK", "NoBatchGetBK", "OtherConstructorBK")
ENV = {"HICACHE_DYNAMIC_BACKENDS": ",".join(f"tests.rigs.backends:{name}" for name in CLASSES)}
NOTHING = Running(None, Knobs())


class FakeSet:
    """A storage set that records its life and fails on demand."""

    made: list["FakeSet"] = []  # noqa: RUF012 - shared on purpose, reset per test

    def __init__(self, guard: Guard | None, knobs: Knobs, name: str) -> None:
        self.guard, self.knobs, self.name = guard, knobs, name
        self.log: list[str] = []
        self.made.append(self)

    start_error: BaseException | None = None
    stuck: list[str] = []  # noqa: RUF012

    def start_parked(self) -> None:
        self.log.append("start")
        if type(self).start_error is not None:
            raise type(self).start_error

    def stop(self, timeout_s: float) -> list[str]:
        self.log.append("stop")
        return list(type(self).stuck)

    def close(self) -> bool:
        self.log.append("close")
        if self.guard is not None:
            self.guard.close()
        return True


def box(make_set: Any = FakeSet, pools: Any = (), env: Any = ENV, **facts: Any) -> StorageAttachment:
    return StorageAttachment(replace(FACTS, **facts), make_set, FORMAT, pools, env=env)


def dynamic(class_name: str = "BK", **fields: Any) -> TargetState:
    config = {"module_path": "tests.rigs.backends", "class_name": class_name, **fields.pop("config", {})}
    return TargetState(backend="dynamic", extra_config=json.dumps(config), **fields)


def file(path: Path | str = "/x", **fields: Any) -> TargetState:
    config = {"file_storage_path": str(path), **fields.pop("config", {})}
    return TargetState(backend="file", extra_config=json.dumps(config), **fields)


def built(attachment: StorageAttachment, target: TargetState, current: Running = NOTHING) -> Parked:
    made = attachment.build(target, current)
    assert isinstance(made, Parked)
    return made
