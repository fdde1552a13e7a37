"""What `/openapi.json` says beyond what FastAPI finds out: errors, streams, fields of other APIs, the key.

A request that fits this description is refused for what it means at most, never for its form.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from stages.serve.access import GUARDED
from stages.serve.request import NO_EFFECT, AnswerRequest, ChatRequest, CompletionRequest

ERRORS = {
    400: "What is wrong with the request, and what to do about it",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    413: "The body is too long",
    429: "Too many requests, of all clients or of this one; Retry-After says when to come back",
    500: "The server failed",
    503: "The server is stopping, or too busy for this schema",
}
UNREAD = (400, 413)  # of requests with a body alone
REQUESTS: tuple[type[AnswerRequest], ...] = (ChatRequest, CompletionRequest)
EMPTY: dict[str, Any] = {"enum": [None, False, [], {}]}


class ErrorDetail(BaseModel):
    """What was wrong; `param` is the field at fault, `code` a fixed name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error, OpenAI's."""

    error: ErrorDetail


def describe(app: FastAPI, *, keys: bool) -> None:
    """Has `/openapi.json` of an application whose routes are all made say the whole truth.

    Args:
        keys: whether requests of the API need one.
    """
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = described["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form, which is never sent
        schemas.pop(name, None)
    for model in (ErrorBody, ErrorDetail):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        schemas[model.__name__] = schema
    for schema in schemas.values():
        if schema.get("additionalProperties") is True:
            schema["additionalProperties"] = EMPTY
    for request in REQUESTS:
        _add_fields_without_effect(schemas[request.__name__], request)
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            if path.startswith(GUARDED):
                _add_errors(operation, method == "post", keys)
            if path.startswith("/v1/") and method == "post":
                operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi = lambda: described  # type: ignore[method-assign]


def _add_fields_without_effect(schema: dict[str, Any], request: type[AnswerRequest]) -> None:
    """Fields that are let through: any value of some, of others those that ask for what happens anyway."""
    properties = schema["properties"]
    properties |= {name: {} for name in sorted(NO_EFFECT)}
    properties |= {name: {"enum": [*values, None]} for name, values in request.neutral.items()}
    schema["additionalProperties"] = False


def _add_errors(operation: dict[str, Any], with_body: bool, keys: bool) -> None:
    responses = operation["responses"]
    body = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
    for status, description in ERRORS.items():
        if (status != 401 or keys) and (with_body or status not in UNREAD):
            responses[str(status)] = {"description": description, "content": {"application/json": body}}
    if keys:
        operation["security"] = [{"key": []}]
