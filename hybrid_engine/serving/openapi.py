"""The server's OpenAPI document, made from the classes of its request bodies, so that both always agree.

Spec: https://spec.openapis.org/oas/v3.1.1. Some schemas allow more than the server does, which also checks several
fields together. They allow everything that the server accepts.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class Endpoint(NamedTuple):
    """A path that the server answers at."""

    path: str
    handler: Callable[..., Any]
    """Handler of the path. The first line of its docstring describes the answer: "`GET /path`: ..."."""
    body: type[BaseModel] | None = None
    """The class of a POST's body; None for a GET."""
    has_events: bool = False
    """Whether it can answer with server-sent events."""
    is_for_metrics: bool = False
    """Whether a key for metrics opens it."""
    needs_key: bool = True
    """Whether it requires a key if the server has any."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.body is None else "POST"


def build_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `endpoints`."""
    known = list(endpoints)
    bodies = [(each.body, "validation") for each in known if each.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=REFERENCE)  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "hybrid-engine", "version": "1"},
        "paths": {
            each.path.replace(":path", ""): {each.method.lower(): _operation(each, _summary(each.handler))}
            for each in known
        },
        "components": {
            "schemas": schemas["$defs"] | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _summary(handler: Callable[..., Any]) -> str:
    return (inspect.getdoc(handler) or "").partition("\n")[0].partition(": ")[2] or handler.__name__


def _operation(endpoint: Endpoint, summary: str) -> dict[str, Any]:
    kind = "text/plain" if endpoint.is_for_metrics else "application/json"
    content: dict[str, Any] = {kind: {}} | ({"text/event-stream": {}} if endpoint.has_events else {})
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    responses = {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "What is wrong.", "content": error},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if endpoint.needs_key:
        operation["security"] = [{"key": []}]
    if "{name" in endpoint.path:
        named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [named]
    if endpoint.body is not None:
        schema = {"$ref": REFERENCE.format(model=endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
