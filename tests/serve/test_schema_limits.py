"""Schemas that would cost the server more than they are worth."""

from __future__ import annotations

from typing import Any

import pytest

from stages.serve.api_error import ApiError
from stages.serve.grammar import Grammars
from stages.targets import Target
from tests.serve.running_server import RunningServer

ITEMS = {"type": "array", "items": {"type": "integer"}}


@pytest.fixture(scope="module")
def grammars(target: Target) -> Grammars:
    return Grammars(target)


@pytest.mark.parametrize(
    "schema",
    [
        {**ITEMS, "maxItems": 4_000_000},
        {**ITEMS, "maxItems": 4e300},
        {**ITEMS, "minItems": 10**9},
        {"anyOf": [{**ITEMS, "minItems": -(10**9)}, {**ITEMS, "maxItems": 30_000}]},
        {"type": "array", "items": {"anyOf": [{**ITEMS, "maxItems": 10**8}]}},
        {"type": "object", "properties": {f"p{i}": {**ITEMS, "maxItems": 900} for i in range(30)}},
    ],
)
def test_lists_of_any_length_are_refused_before_they_are_written_out(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    with pytest.raises(ApiError, match="may have more than 20000 items; lower maxItems"):
        grammars.mask(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**ITEMS, "maxItems": 1000},
        {"type": "object", "properties": {"maxItems": {"type": "integer"}}},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
    ],
)
def test_what_costs_little_is_taken(grammars: Grammars, schema: dict[str, Any]) -> None:
    assert grammars.mask(schema)([]).any()


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_a_deep_schema_is_refused_or_followed_and_never_fails(server: RunningServer, depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.chat(response_format=form, max_tokens=2)
    assert response.status_code in (200, 400)
    assert server.chat(max_tokens=1).status_code == 200
