"""The extra config's ``instance``: a bounded name of the operator's own (F92)."""

import json

import pytest

from hicache_hooks.cache.config import Running, compare, resolve
from hicache_hooks.cache.knobs import Knobs
from hicache_proto.errors import InvalidConfig
from hicache_proto.model import TargetState

NOTHING = Running(None, Knobs())


def resolved(**config: object) -> Running:
    text = json.dumps({"file_storage_path": "/x", **config})
    return resolve(TargetState(backend="file", extra_config=text), NOTHING, namespace="ns", env={})


def test_it_is_no_option_of_the_backend_and_another_one_is_another_store() -> None:
    plain, a, b = resolved(), resolved(instance="a"), resolved(instance="b")
    assert plain.config is not None
    assert a.config is not None
    assert (plain.config.instance, a.config.instance) == ("", "a")
    assert a.config.options == plain.config.options
    assert compare(a, resolved(instance="a")).relation == "same"
    assert compare(a, b).changed_keys == compare(plain, b).changed_keys == ["instance"]
    assert compare(a, b).relation == "swap"


@pytest.mark.parametrize("name", ["", 'a"b', "a\nb", "-a", "a b", "x" * 33, 7, None, ["a"], "ä"])
def test_names_that_a_label_could_not_bear_are_refused(name: object) -> None:
    """F92: quotes, newlines and the like are 422."""
    with pytest.raises(InvalidConfig) as caught:
        resolved(instance=name)
    assert caught.value.details["reason"] == "bad_instance"


def test_a_misspelt_one_is_told_so() -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolved(instanze="a")
    assert caught.value.details["suggestion"] == "instance"
