"""The Python entrance: prompts of all kinds, batches, stops."""

from __future__ import annotations

import pytest

from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.errors import EagleError
from stages.targets import Target
from tests.decoding.test_engine import random_head

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tiny_target: Target) -> EagleModel:
    tree = TreeConfig.parse("dynamic")
    return EagleModel(tiny_target, random_head(tiny_target), tree, max_batch=3)


def test_a_batch_gives_what_its_prompts_give_alone(model: EagleModel) -> None:
    prompts = ["hello", "a longer text than that", MESSAGES, [5, 6, 7], [1]]
    alone = [model.generate(prompt, max_new_tokens=20, ignore_eos=True) for prompt in prompts]
    for batch in (prompts[:2], prompts[2:], prompts[3:]):
        together = model.generate(batch, max_new_tokens=20, ignore_eos=True)
        expected = [alone[prompts.index(prompt)] for prompt in batch]
        assert [g.token_ids for g in together] == [g.token_ids for g in expected]
        assert [g.text for g in together] == [g.text for g in expected]
    assert alone[0].token_ids == alone[2].token_ids  # a text is one turn of a user
    assert alone[0].stats.tokens == 19


def test_fields_of_sampling_are_keywords_or_params_and_not_both(model: EagleModel) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0.7, seed=3)
    expected = model.generate("hello", params)
    assert model.generate("hello", max_new_tokens=8, temperature=0.7, seed=3).token_ids == expected.token_ids
    streamed = model.stream("hello", max_new_tokens=8, temperature=0.7, seed=3)
    assert [token for tokens in streamed for token in tokens] == expected.token_ids
    with pytest.raises(TypeError, match="seed"):
        model.generate("hello", params, seed=4)
    with pytest.raises(EagleError, match="top_p"):
        model.generate("hello", top_p=2.0)


def test_a_stop_text_ends_the_output_and_is_cut_off(model: EagleModel) -> None:
    whole = model.generate([5, 6, 7], max_new_tokens=60, ignore_eos=True)
    stop = whole.text[10:13]
    found = whole.text.index(stop)
    ended = model.generate([5, 6, 7], max_new_tokens=60, ignore_eos=True, stop=[stop, "never seen"])
    assert (ended.text, ended.finish_reason) == (whole.text[:found], "stop")
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert stop in model.target.decode(ended.token_ids)
    assert stop not in model.target.decode(ended.token_ids[:-1])


def test_a_refused_prompt_in_a_batch_leaves_nothing_behind(model: EagleModel) -> None:
    with pytest.raises(EagleError, match="1 to 511"):
        model.generate([[1, 2, 3], [1] * 600], max_new_tokens=5)
    assert not model.engine.busy
    with pytest.raises(EagleError, match="0 to 511"):
        model.generate([[10**6]], max_new_tokens=5)
    with pytest.raises(EagleError, match="empty"):
        model.generate([], max_new_tokens=5)
