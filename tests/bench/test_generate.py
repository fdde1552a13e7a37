"""Claims about transformers' own generate as a contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.bench.line_up import parse_drafters
from stages.bench.transformers_generate import Generate, GenerateChoice
from stages.bench.workload import Job
from stages.decoding import EagleModel, SamplingParams
from stages.errors import EagleError
from stages.targets import Target, load_target

TEXTS = ("write a line", "count one two three one two three one two", "and another one that is longer")
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def untouched(target_folder: Path) -> Any:
    return load_target(str(target_folder), device="cpu", dtype="float32", decodes=False).model


@pytest.fixture(scope="module")
def jobs(target: Target) -> list[tuple[int, Job]]:
    chats = [({"role": "user", "content": text},) for text in TEXTS]
    return [(i, Job("set", str(i), 0, chat, tuple(target.render(chat)))) for i, chat in enumerate(chats)]


@pytest.mark.parametrize("lookup", [None, 3])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_its_greedy_texts_are_ours_in_a_batch_and_with_lookup(
    target: Target, untouched: Any, jobs: list[tuple[int, Job]], lookup: int | None, concurrency: int
) -> None:
    turn = Generate(target, untouched, GenerateChoice(lookup)).answer(jobs, concurrency, PARAMS)
    ours = EagleModel(target).generate([list(job.prompt_ids) for _, job in jobs], PARAMS)
    for sample, expected in zip(turn.samples, ours, strict=True):
        assert sample.text == expected.text
        assert sample.output_tokens == len(expected.token_ids)
        assert sample.finish_reason == expected.finish_reason
        assert sample.token_ids == ()  # whatever it answers is told, and never a fault of ours
        assert 0 < sample.ttft_s <= sample.e2el_s <= turn.duration_s
        assert sample.e2el_s - sample.ttft_s == pytest.approx(sum(sample.itl_s), abs=1e-4)
        if lookup is not None:
            assert sample.steps + sample.accepted in (sample.output_tokens - 1, sample.output_tokens)
        else:
            assert len(sample.itl_s) == sample.output_tokens - 1
    assert turn.verify_s is None


def test_with_lookup_requests_wait_for_each_other(
    target: Target, untouched: Any, jobs: list[tuple[int, Job]]
) -> None:
    turn = Generate(target, untouched, GenerateChoice(3)).answer(jobs, 3, PARAMS)
    ends = [sample.e2el_s for sample in turn.samples]
    assert ends == sorted(ends)
    for before, sample in zip(turn.samples, turn.samples[1:], strict=False):
        assert sample.ttft_s > before.e2el_s


def test_a_request_that_is_not_due_yet_is_in_no_batch(
    target: Target, untouched: Any, jobs: list[tuple[int, Job]]
) -> None:
    turn = Generate(target, untouched, GenerateChoice()).answer(jobs, 3, PARAMS, due=[0.0, 0.0, 30 / 64])
    assert turn.duration_s > 30 / 64
    assert [sample.request for sample in turn.samples] == [0, 1, 2]


def test_it_is_named_among_the_drafters_with_its_settings() -> None:
    drafters = parse_drafters("none,eagle3,transformers,transformers:prompt-lookup=4,ngram:min=1,max=2")
    assert [str(each) for each in drafters.choices] == ["none", "eagle3", "ngram:min=1,max=2"]
    assert drafters.generates == [GenerateChoice(), GenerateChoice(4)]
    assert GenerateChoice.parse("transformers:prompt-lookup") == GenerateChoice(10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transformers:beam", "transformers takes prompt-lookup"),
        ("transformers:prompt-lookup=0", "transformers takes prompt-lookup"),
        ("transformers,transformers", "names transformers twice"),
        ("none,transformers", "leaves nothing to compare"),
    ],
)
def test_what_it_cannot_do_is_refused(text: str, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        parse_drafters(text)
