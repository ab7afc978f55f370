"""The OpenAPI document is in step with the routes, and valid."""

import json

from openapi_spec_validator import validate

from hicache_proto.errors import ERRORS
from hicache_sidecar.core.actor import Role
from hicache_sidecar.server import openapi
from hicache_sidecar.server.routes import BACKEND, ROUTES


def test_document_is_valid_and_complete() -> None:
    document = json.loads(openapi.document())
    validate(document)
    shown = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert shown == {(route.method, route.path) for route in ROUTES}
    identifiers = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(set(identifiers)) == len(identifiers)


def test_routes_are_unique() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_levels_and_errors_are_shown() -> None:
    document = json.loads(openapi.document())
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["x-role"] == route.level.name.lower()
        assert (operation["security"] == []) == (route.level is Role.NONE)
        if route.level is not Role.NONE:
            assert {str(cls.status) for cls in ERRORS.values()} <= set(operation["responses"])


def test_put_shows_the_fields_of_the_contract() -> None:
    document = json.loads(openapi.document())
    schema = document["components"]["schemas"]["AttachBody"]
    assert set(schema["properties"]) == {
        "hicache_storage_backend", "hicache_storage_backend_extra_config_json", "hicache_storage_prefetch_policy",
        "hicache_write_policy", "mode", "swap", "checkpoint", "wait_timeout_s", "timeout_s", "dry_run", "reason",
        "force",
    }  # fmt: skip
    assert schema["required"] == ["hicache_storage_backend"]
    assert schema["additionalProperties"] is False
    parameters = document["paths"][BACKEND]["delete"]["parameters"]
    assert {p["name"] for p in parameters} >= {
        "mode",
        "checkpoint",
        "wait_timeout_s",
        "timeout_s",
        "reason",
        "If-Match",
        "Idempotency-Key",
    }
