"""Answers that must follow a JSON schema do, with speculation on, and are what plain decoding gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from stages.decoding import DrafterChoice, EagleModel, SamplingParams, TreeConfig
from stages.serve.grammar import Grammars
from stages.targets import Target
from tests.serve.running_server import NAME, RunningServer, running_server


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(max_length=4)
    size: int = Field(ge=0, le=999)
    fresh: bool
    tags: list[Literal["red", "blue"]] = Field(max_length=2)


SCHEMA = Thing.model_json_schema()
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}


EXAMPLE = '{"name": "te", "size": 10, "fresh": true, "tags": ["red"]}'
PROMPT = f"something like {EXAMPLE}"


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[RunningServer]:
    """Drafts from the prompt, which has an example of what is wanted."""
    drafter = DrafterChoice.parse("ngram:min=1,max=4")
    model = EagleModel(target, tree=TreeConfig.parse("chain:depth=3"), drafter=drafter, max_batch=8)
    with running_server(model) as running:
        yield running


def test_100_of_100_answers_follow_the_schema(
    server: RunningServer, target: Target, plain: EagleModel
) -> None:
    fields: dict[str, Any] = {"max_tokens": 250, "response_format": FORMAT}
    prompts = [[f"{number} {PROMPT}" for number in range(start, start + 20)] for start in (10, 30, 50, 70)]
    with ThreadPoolExecutor(2) as clients:
        greedy = [clients.submit(server.complete, each, temperature=0, **fields) for each in prompts]
        sampled = clients.submit(server.chat, PROMPT, temperature=1.0, seed=3, n=20, **fields)
        bodies = [job.result().json() for job in (*greedy, sampled)]
    choices = [choice for body in bodies for choice in body["choices"]]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    assert len(texts) == 100
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    for text in texts:
        Thing.model_validate_json(text)
    assert len(set(texts)) > 50
    assert sum(body["usage"]["speculation"]["accepted"] for body in bodies) > 100
    for sample in range(2):
        mask = Grammars(target).mask(SCHEMA)
        params = SamplingParams(max_new_tokens=250, temperature=1.0, seed=3, sample=sample, token_mask=mask)
        assert plain.generate([{"role": "user", "content": PROMPT}], params).text == texts[80 + sample]


def test_the_openai_clients_own_models_are_parsed(server: RunningServer) -> None:
    answer = server.openai().chat.completions.parse(
        model=NAME, messages=[{"role": "user", "content": "x"}], response_format=Thing, seed=1, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Thing)


def test_a_json_object_is_an_object(server: RunningServer) -> None:
    for seed in range(3):
        body = server.complete("x", seed=seed, max_tokens=60, response_format={"type": "json_object"}).json()
        choice = body["choices"][0]
        assert choice["text"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            TypeAdapter(dict[str, Any]).validate_python(json.loads(choice["text"]))


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"$ref": "https://example.com/schema"}, {"pattern": "("}],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_one_line(
    server: RunningServer, schema: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.chat(response_format=form)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert error["message"].startswith("the schema cannot be followed: ")
    assert "\n" not in error["message"]


def test_a_mask_depends_on_the_output_alone(target: Target) -> None:
    """Whatever paths of a tree it was asked about before, drafts that the grammar forbids among them."""
    grammars = Grammars(target)
    eos = target.tokenizer.eos_token_id
    ids = target.tokenizer.encode(EXAMPLE)
    wandering = grammars.mask(SCHEMA)
    for end in range(len(ids) + 1):
        fresh = grammars.mask(SCHEMA)(ids[:end])
        assert fresh.tolist() == wandering(ids[:end]).tolist()
        if end < len(ids):
            assert fresh[ids[end]]
        forbidden = next(token for token in range(511) if not fresh[token])
        assert wandering([*ids[:end], forbidden, 5]).all()
        wandering(ids[: end // 2])
    assert wandering(ids)[eos]
    assert wandering([*ids, eos]).all()
    assert wandering(ids).tolist() == grammars.mask(SCHEMA)(ids).tolist()
