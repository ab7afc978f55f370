"""F70 in the cache: a store that lost all it held gets again what L1 and L2 still have, without an error."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.rigs.backends import BK, EpochBK
from tests.unit.cache.support import Rig, prompt

from hicache_hooks.backends.base import StoreContext
from hicache_hooks.guard import Guard
from hicache_hooks.guard_settings import GuardSettings

TEXT = prompt(6)


class Held:
    """A rig over a guarded store that says its epoch."""

    def __init__(self) -> None:
        rig = self.rig = Rig()
        context = StoreContext(namespace=rig.namespace, page_bytes=rig.host.page_bytes, layout="page_first")
        self.backend = EpochBK({}, context)
        self.backend.open()
        self.guard = Guard(self.backend, name="bk", settings=GuardSettings(probe_idle_s=0.0, epoch_s=1000.0))
        self.guard.learn_epoch()
        self.cache = rig.ctl
        self.cache.install(rig.make_set(self.guard))  # type: ignore[arg-type]

    @property
    def data(self) -> dict[str, bytes]:
        return self.backend.rig_.data

    def look(self) -> None:
        """What the guard's monitor does now and then."""
        self.guard.learn_epoch()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.guard.close()
    made.rig.close()
    with suppress(KeyError):
        BK.reset()


def test_pages_are_stored_again_at_their_next_use(held: Held) -> None:
    held.rig.serve(TEXT)
    stored = dict(held.data)
    assert len(stored) == 6
    held.rig.serve(TEXT)
    puts = held.backend.rig_.calls["batch_put"]
    held.backend.rig_.forget()
    held.rig.serve(TEXT)
    assert held.backend.rig_.calls["batch_put"] == puts  # still believed to be there
    held.look()
    held.rig.serve(TEXT)
    assert dict(held.data).keys() == stored.keys()
    assert all(node.stored_in == held.cache.storage.id for node in held.cache.tree.nodes())
    usage = held.guard.usage()
    assert all(counts.error == counts.timeout == counts.skipped == 0 for counts in usage.values())


def test_a_backup_that_began_before_the_loss_does_not_count(held: Held) -> None:
    """It ends after the loss: its pages may have gone to the store that was, so its node is not marked."""
    held.rig.serve(TEXT)
    node = next(iter(held.cache.tree.nodes()))
    held.data.clear()
    node.stored_in = 0
    assert held.cache._writer.back_up(node)
    held.backend.rig_.epoch += 1
    held.look()
    held.rig.settle()
    assert node.stored_in != held.cache.storage.id
    held.rig.serve(TEXT)
    assert node.stored_in == held.cache.storage.id


def test_what_we_cleared_ourselves_is_stored_again_too(held: Held) -> None:
    held.rig.serve(TEXT)
    assert held.guard.clear() == 6
    held.rig.serve(TEXT)
    assert len(held.data) == 6
    assert held.guard.report().epoch_changes == 0
