"""Refusals of a wrong value name the values that would do, whatever is between the top and the place."""

from typing import Literal

import msgspec
import pytest
from tests.unit.server.fakes import FakeService, call

from hicache_proto import control
from hicache_sidecar.core.explain import explain
from hicache_sidecar.obs.counters import Counters
from hicache_sidecar.server import bodies
from hicache_sidecar.server.auth import Tokens
from hicache_sidecar.server.hosts import Hosts
from hicache_sidecar.server.http import HttpApi
from hicache_sidecar.server.routes import BACKEND

WRITE = ["write_back", "write_through", "write_through_selective"]
PREFETCH = ["best_effort", "timeout", "wait_complete"]


def refused(value: object, kind: type) -> tuple[str, dict[str, object]]:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)
    return explain(caught.value, kind)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("hicache_write_policy", "write-through", WRITE),
        ("hicache_storage_prefetch_policy", "best-effort", PREFETCH),
        ("mode", "", ["drain", "hot", "strict"]),
    ],
)
async def test_http_lists_the_names_and_sends_nothing(field: str, value: str, allowed: list[str]) -> None:
    """F60: ``write-through`` with a hyphen is 422 with the three names, and no rank hears of it."""
    service = FakeService()
    app = HttpApi(service, Tokens, Hosts, Counters())
    reply = await call(app, "PUT", BACKEND, {"hicache_storage_backend": "file", field: value})
    assert (reply.status, reply.code) == (422, "invalid_request")
    assert reply.json["error"]["details"] == {"field": field, "allowed": allowed}
    assert all(name in reply.json["error"]["message"] for name in allowed)
    assert service.seen == []


async def test_query_parameters_too() -> None:
    reply = await call(HttpApi(FakeService(), Tokens, Hosts, Counters()), "DELETE", f"{BACKEND}?mode=quick")
    assert reply.json["error"]["details"] == {"field": "mode", "allowed": ["drain", "hot", "strict"]}


def test_places_inside_maps_and_unions() -> None:
    """A failover policy lies in a map, on the socket inside a union of requests besides."""
    text, details = refused({"policies": {"file": {"action": "explode"}}}, bodies.FailoverBody)
    assert details["field"] == "action"
    assert "bypass" in text
    body = {"type": "set_failover", "policies": {"file": {"action": "explode"}}}
    assert refused({"type": "request", "id": 1, "body": body}, control.Request)[1] == details


def test_a_key_that_is_nearly_one_is_named() -> None:
    """F53: SGLang's status names the config without ``_json``; its PUT does with it."""
    name = "hicache_storage_backend_extra_config"
    text, details = refused({"hicache_storage_backend": "file", name: "{}"}, bodies.AttachBody)
    assert details == {"field": name, "suggestion": f"{name}_json"}
    assert text.endswith(f"; did you mean {name}_json?")
    assert refused({"hicache_storage_backend": "file", "zz": 1}, bodies.AttachBody)[1] == {}


def test_other_refusals_stay_as_they_are() -> None:
    text, details = refused({"hicache_storage_backend": 3}, bodies.AttachBody)
    assert text == "Expected `str`, got `int` - at `$.hicache_storage_backend`"
    assert details == {}


def test_items_of_lists() -> None:
    assert refused([["a"], ["z"]], list[list[Literal["a", "b"]]])[1] == {"field": "", "allowed": ["a", "b"]}
