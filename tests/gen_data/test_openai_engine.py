"""Answers from a fleet are the ids that were sampled, or are not taken; whatever the fleet does meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from stages.decoding import GenerationResult
from stages.errors import EagleError
from stages.gen_data.config import GenDataConfig
from stages.gen_data.engines import endpoint
from stages.gen_data.engines.engine import Question, Unusable
from stages.gen_data.engines.openai_engine import OpenAiEngine
from stages.gen_data.rollout import AnswerSettings, Dialogue, roll_out
from stages.prompts import Prompt
from stages.targets import Target
from tests.gen_data.fleet import Fleet, Sampled

SETTINGS = AnswerSettings(max_new_tokens=40, temperatures=(0.0,), top_p=1.0, seed=0, batch_size=4)


def says(target: Target, text: str) -> Sampled:
    """The tokenizer's own ids for a text, then the end of turn."""
    return [*target.tokenizer.encode(text), target.tokenizer.eos_token_id], "stop"


def canonical(target: Target) -> Callable[[list[int]], Sampled]:
    return lambda prompt: says(target, f"what is there to say about {sum(prompt)}")


def letter_by_letter(target: Target) -> Callable[[list[int]], Sampled]:
    """The same text as by tokens that the tokenizer would not choose."""
    eos = target.tokenizer.eos_token_id
    return lambda prompt: (
        [i for letter in "to eat" for i in target.tokenizer.encode(letter)] + [eos],
        "stop",
    )


def questions(target: Target, count: int = 6) -> list[Question]:
    found = []
    for i in range(count):
        dialogue = Dialogue(Prompt(f"p{i}", (f"question {i}",), "test"))
        dialogue.ask(target, 1000)
        found.append(dialogue.question(str(i), SETTINGS))
    return found


def ask(fleet: Fleet, count: int = 6, **options: Any) -> dict[str, GenerationResult | Unusable]:
    """The answers by question."""
    with started(fleet, **options) as engine:
        return {answer.id: answer for answer in engine.answers(questions(fleet.target, count))}


@contextmanager
def started(fleet: Fleet, **options: Any) -> Iterator[OpenAiEngine]:
    if fleet.models == []:
        fleet.models = [{"id": fleet.target.name}]
    with (
        fleet.running() as url,
        closing(OpenAiEngine(fleet.target, url, options.pop("batch_size", 4), 256, **options)) as engine,
    ):
        yield engine


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("completions", [True, False])
def test_answers_are_the_ids_that_were_sampled(
    tiny_target: Target, completions: bool, token_ids: bool, strict: bool
) -> None:
    sample = canonical(tiny_target)
    fleet = Fleet(tiny_target, sample, completions=completions, token_ids=token_ids, strict=strict)
    answers = ask(fleet)
    for question in questions(tiny_target):
        ids, reason = sample(question.prompt_ids)
        assert answers[question.id] == GenerationResult(question.id, ids, reason)  # type: ignore[arg-type]
    asked = fleet.requests[-1]
    assert ("prompt" in asked, "return_token_ids" in asked) == (completions, token_ids and not strict)


@pytest.mark.parametrize("token_ids", [True, False])
def test_text_that_could_be_other_tokens_is_not_taken(tiny_target: Target, token_ids: bool) -> None:
    answers = ask(Fleet(tiny_target, letter_by_letter(tiny_target), token_ids=token_ids))
    reasons = {answer.reason for answer in answers.values() if isinstance(answer, Unusable)}
    assert reasons == (set() if token_ids else {"unverified"})


def test_one_token_for_two_is_noticed_by_the_count_alone(tiny_target: Target) -> None:
    """The end of the answer must not make up for it."""
    eos = tiny_target.tokenizer.eos_token_id
    pair = tiny_target.tokenizer.encode("ea")
    assert len(pair) == 1
    fleet = Fleet(tiny_target, lambda prompt: ([*pair, eos], "stop"), token_ids=False)
    fleet.change = lambda text: "e a"  # two tokens
    assert {type(answer) for answer in ask(fleet).values()} == {Unusable}


def test_an_answer_cut_within_a_character_is_not_taken(tiny_target: Target) -> None:
    half = tiny_target.tokenizer.encode("\u00e9")[:1]
    whole = tiny_target.tokenizer.encode("eat")
    fleet = Fleet(
        tiny_target,
        lambda prompt: (whole + half if sum(prompt) % 2 else whole, "length"),
        token_ids=False,
    )
    answers = ask(fleet)
    for question in questions(tiny_target):
        cut = sum(question.prompt_ids) % 2
        assert isinstance(answers[question.id], Unusable if cut else GenerationResult)


def test_a_busy_and_broken_fleet_answers_in_the_end(tiny_target: Target, short_pauses: None) -> None:
    rng = random.Random(0)
    faults = [rng.choice([429, 500, 503, "drop", "truncate", *[None] * 8]) for _ in range(2000)]
    sample = canonical(tiny_target)
    fleet = Fleet(tiny_target, sample, fault=faults.__getitem__)
    answers = ask(fleet, count=60, batch_size=8)
    assert len(fleet.requests) > 80
    for question in questions(tiny_target, 60):
        assert answers[question.id] == GenerationResult(question.id, *sample(question.prompt_ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (503, r"fails again and again .503: not now.*continues behind the last shard"),
        ("drop", r"cannot be reached .*continues behind the last shard"),
        ("html", "does not answer in JSON but with '<html>'"),
    ],
)
def test_a_fleet_that_stays_broken_is_an_error(
    tiny_target: Target, short_pauses: None, fault: int | str, words: str
) -> None:
    fleet = Fleet(tiny_target, canonical(tiny_target), fault=lambda number: fault if number else None)
    with pytest.raises(EagleError, match=words) as caught:
        ask(fleet)
    assert "\n" not in str(caught.value)


def test_nobody_at_the_address_is_said_at_once(tiny_target: Target) -> None:
    start = time.monotonic()
    with pytest.raises(EagleError, match="cannot be reached"):
        OpenAiEngine(tiny_target, "http://127.0.0.1:9", 4, 256)
    assert time.monotonic() - start < 5


def test_the_key_comes_from_the_environment(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)
    with pytest.raises(EagleError, match=r"refuses the key .401.: set OPENAI_API_KEY"):
        ask(Fleet(tiny_target, canonical(tiny_target), key="abc"))
    monkeypatch.setenv(endpoint.KEY_VARIABLE, "abc")
    assert len(ask(Fleet(tiny_target, canonical(tiny_target), key="abc"))) == 6


@pytest.mark.parametrize("root", [True, False])
def test_another_model_is_refused_unless_it_is_named(tiny_target: Target, root: bool) -> None:
    card = {"id": "other"} | ({"root": tiny_target.name} if root else {})
    fleet = Fleet(tiny_target, canonical(tiny_target), models=[card])
    if not root:
        with pytest.raises(EagleError, match=r"has other, and not .*--served-model"):
            ask(fleet)
    ask(fleet, served_model=None if root else "other")
    assert {request["model"] for request in fleet.requests} == {"other"}


def test_a_server_without_a_list_of_models_is_asked_for_the_target(tiny_target: Target) -> None:
    fleet = Fleet(tiny_target, canonical(tiny_target), models=None)
    ask(fleet)
    assert {request["model"] for request in fleet.requests} == {tiny_target.name}


def test_another_tokenizer_is_noticed(tiny_target: Target) -> None:
    fleet = Fleet(tiny_target, canonical(tiny_target), extra_tokens=1)
    with pytest.raises(EagleError, match="has another tokenizer or chat template"):
        ask(fleet)


def test_a_shorter_context_is_noticed(tiny_target: Target) -> None:
    card = {"id": tiny_target.name, "max_model_len": 128}
    with pytest.raises(EagleError, match="give --max-model-len 128"):
        ask(Fleet(tiny_target, canonical(tiny_target), models=[card]))


def test_mostly_useless_answers_end_the_run(tiny_target: Target) -> None:
    fleet = Fleet(tiny_target, canonical(tiny_target), token_ids=False, change=lambda text: text + " indeed")
    with pytest.raises(EagleError, match=r"20 of 20 answers .* cannot be used"):
        ask(fleet, count=30)


@pytest.mark.parametrize("sample", [canonical, letter_by_letter])
@pytest.mark.parametrize("completions", [True, False])
def test_rows_hold_what_the_server_saw_also_when_it_renders_the_chat(
    tiny_target: Target, completions: bool, sample: Callable[[Target], Callable[[list[int]], Sampled]]
) -> None:
    fleet = Fleet(tiny_target, sample(tiny_target), completions=completions)
    prompt = Prompt("p", ("one", "two", "three"), "test")
    seen: list[list[int]] = []

    def noted(ids: list[int]) -> Sampled:
        seen.append(ids)
        return sample(tiny_target)(ids)

    fleet.sample = noted
    with started(fleet) as engine:
        rows = roll_out(tiny_target, [prompt], SETTINGS, engine).rows
    _, *turns = seen  # the first is the engine's own look at the server
    spans = [
        row.input_ids[:i]
        for row in rows
        for i, sampled in enumerate(row.loss_mask)
        if sampled and not row.loss_mask[i - 1]
    ]
    assert spans == turns
    assert len(rows) == (1 if completions or sample is canonical else 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine": "openai"}, "--engine openai and --base-url go together"),
        ({"base_url": "http://127.0.0.1"}, "--engine openai and --base-url go together"),
        ({"engine": "openai", "base_url": "127.0.0.1:8000"}, "must begin with http"),
        ({"served_model": "other"}, "--served-model is for --engine openai"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is for --engine vllm"),
    ],
)
def test_flags_of_another_engine_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GenDataConfig(target="t", prompts=["p"], output="o", **flags)


def test_neither_address_nor_key_enters_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoint.KEY_VARIABLE, "a-secret")
    url = "http://user:password@host/v1"
    config = GenDataConfig(target="t", prompts=["p"], output="o", engine="openai", base_url=url)
    assert not any(word in str(config.settings()) for word in ("a-secret", "password", "host"))
