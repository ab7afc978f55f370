"""OpenAPI 3.1 from the route table: schemas by msgspec, paths by the rows. Nothing is written down twice."""

import functools
import re
from typing import Any

import msgspec

from hicache_proto import __version__
from hicache_proto.api import ErrorDocument
from hicache_proto.errors import ERRORS
from hicache_sidecar.core.actor import Role
from hicache_sidecar.server.bodies import Empty
from hicache_sidecar.server.routes import ROUTES, Route

_REF = "#/components/schemas/{name}"


@functools.cache
def document() -> bytes:
    """The document as JSON. Made once, when first asked for."""
    return msgspec.json.encode(build())


def build(routes: tuple[Route, ...] = ROUTES) -> dict[str, Any]:
    """The document as builtins."""
    types = {t for route in routes for t in (route.document, route.body, route.query) if t not in (None, dict)}
    ordered = [*sorted(types, key=lambda t: t.__name__), ErrorDocument]
    refs, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schema = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hicache-sidecar admin API", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schema: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _identifier(route),
        "summary": route.summary,
        "parameters": _parameters(route, components),
        "responses": _responses(route, schema),
        "x-role": route.level.name.lower(),
        # Without a configured token loopback needs none, hence the empty alternative.
        "security": [] if route.level is Role.NONE else [{"bearer": []}, {}],
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": schema[route.body]}},
        }
    return operation


def _responses(route: Route, schema: dict[Any, Any]) -> dict[str, Any]:
    content = {"type": "object"} if route.document is dict else schema.get(route.document, {"type": "string"})
    ok: dict[str, Any] = {"description": "Done.", "content": {route.media: {"schema": content}}}
    if route.path.endswith("storage-backend") and route.method == "GET":
        ok["headers"] = {"ETag": {"description": "The revision, quoted.", "schema": {"type": "string"}}}
    error = {"content": {"application/json": {"schema": schema[ErrorDocument]}}}
    statuses: dict[str, list[str]] = {}
    for cls in ERRORS.values():
        statuses.setdefault(str(cls.status), []).append(cls.code)
    if route.level is Role.NONE:
        statuses = {"403": ["forbidden"]} | ({"503": ["no_engine"]} if route.path == "/readyz" else {})
    return {"200": ok} | {
        status: {"description": ", ".join(codes), **error} for status, codes in sorted(statuses.items())
    }


def _parameters(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    if route.query is not Empty:
        properties = components[route.query.__name__]["properties"]
        found += [{"name": name, "in": "query", "schema": inner} for name, inner in properties.items()]
    if route.conditional:
        found += [
            {"name": name, "in": "header", "schema": {"type": "string"}} for name in ("If-Match", "Idempotency-Key")
        ]
    if route.media == "text/event-stream":
        found.append({"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer", "minimum": 0}})
    return found


def _identifier(route: Route) -> str:
    words = re.findall(r"\w+", route.path)
    return "_".join([route.method.lower(), *words])
