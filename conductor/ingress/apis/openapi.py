"""What GET /openapi.json tells: the paths of this server, and what their requests are made of.

Gateways, generators of clients and fuzzers read it. All of it comes from the routes and from the types that decode
their bodies; what answers are made of is for OpenAI and Anthropic to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.http.errors import Handler, guarded

_PARAMETER = re.compile(r"\{(\w+):\w+\}")
_ANSWERS = {"200": {"description": "the answer"}, "default": {"description": "what is wrong, and when to come back"}}


class Post(Route):
    """A path that takes JSON of the type ``form``."""

    def __init__(self, path: str, endpoint: Handler, form: type[msgspec.Struct]) -> None:
        super().__init__(path, endpoint, methods=["POST"])
        self.form = form


def openapi_route(routes: Sequence[Route], version: str) -> Route:
    """The path that tells of ``routes``."""
    page = msgspec.json.encode(document(routes, version))

    async def tell(request: Request) -> Response:
        return Response(page, media_type="application/json")

    return Route("/openapi.json", guarded(tell), methods=["GET"])


def document(routes: Sequence[Route], version: str) -> dict[str, object]:
    """In OpenAPI's form, for msgspec to encode."""
    forms = list(dict.fromkeys(route.form for route in routes if isinstance(route, Post)))
    schemas, components = msgspec.json.schema_components(
        forms, schema_hook=_any_value, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(forms, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        operation: dict[str, object] = {"responses": _ANSWERS}
        if isinstance(route, Post):
            body = {"application/json": {"schema": schema_of[route.form]}}
            operation["requestBody"] = {"required": True, "content": body}
        if names := _PARAMETER.findall(route.path):
            text = {"type": "string"}
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        told = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        told |= {method.lower(): operation for method in sorted(route.methods or ()) if method != "HEAD"}
    info = {"title": "mooncake", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _any_value(kind: type) -> dict[str, object]:
    """The schema of what msgspec has none for. Raises NotImplementedError."""
    if kind is object:
        return {"description": "any value"}
    raise NotImplementedError
