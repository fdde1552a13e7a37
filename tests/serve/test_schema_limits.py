"""Schemas that would cost the server more than they are worth."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stages.decoding import EagleModel
from stages.serve.api_error import ApiError
from stages.serve.grammar import Grammars
from stages.serve.schema_trial import needs_trial
from stages.targets import Target
from tests.serve.running_server import RunningServer, running_server

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


def doubling(levels: int) -> dict[str, Any]:
    """Definitions each of which needs the next one twice, in two ways."""
    found: dict[str, Any] = {f"d{levels}": {"type": "object"}}
    for i in range(levels):
        found[f"d{i}"] = {"type": "object", "properties": {}}
        for name, other in ("xz", "yw"):
            more = {"type": "object", "properties": {other: {"type": "integer"}}}
            found[f"d{i}"]["properties"][name] = {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, more]}
    return {"$defs": found, "$ref": "#/$defs/d0"}


HARD: list[dict[str, Any]] = [{"type": "number", "multipleOf": 2**31}, doubling(24)]


def test_what_takes_hours_is_refused_within_seconds(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.serve.schema_trial.CPU_SECONDS", 1)
    for schema in HARD:
        with pytest.raises(ApiError, match="it takes too long, or too much memory; make it simpler"):
            grammars.mask(schema)
    monkeypatch.setattr("stages.serve.schema_trial.subprocess.run", None)
    for schema in HARD:
        with pytest.raises(ApiError, match="make it simpler"):  # from memory
            grammars.mask(schema)


def test_what_could_not_be_tried_may_come_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, schema = Grammars(target), {"type": "number", "multipleOf": 0.5}
    for what in ("PATIENCE_SECONDS", "sys.executable"):
        with monkeypatch.context() as patch:
            patch.setattr(f"stages.serve.schema_trial.{what}", 0.0 if what[0] == "P" else "/no/python")
            with pytest.raises(ApiError, match="try again") as caught:
                grammars.mask(schema)
            assert (caught.value.status, caught.value.code) == (503, "server_busy")
    assert grammars.mask(schema)([]).any()


def test_what_is_tried_first_is_followed_as_well_and_its_faults_are_told(grammars: Grammars) -> None:
    for schema in ({"type": "number", "multipleOf": 0.01}, doubling(3)):
        assert needs_trial([schema])
        assert grammars.mask(schema)([]).any()
    with pytest.raises(ApiError, match="the schema cannot be followed"):
        grammars.mask({"$ref": "#/$defs/no"})
    assert not needs_trial(
        [{"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"const": 1}]}}}]
    )
    assert needs_trial([{"enum": list(range(3000))}])


def test_nobody_else_waits_for_a_hard_schema(plain: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done = threading.Event(), threading.Event()

    def slowly(_: str) -> bool:
        begun.set()
        return done.wait(60)

    monkeypatch.setattr("stages.serve.grammar.within_limits", slowly)
    with running_server(plain) as slow, ThreadPoolExecutor(1) as clients:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"multipleOf": 5, "type": "integer"}},
        }
        waits = clients.submit(slow.chat, response_format=form, max_tokens=4)
        assert begun.wait(60)
        assert slow.chat(max_tokens=1).status_code == 200
        assert not waits.done()
        done.set()
        assert waits.result().status_code == 200


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_a_deep_schema_is_refused_or_followed_and_never_fails(server: RunningServer, depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.chat(response_format=form, max_tokens=2)
    assert response.status_code in (200, 400)
    assert server.chat(max_tokens=1).status_code == 200
