from __future__ import annotations

import itertools

import pytest
import torch

from stages.gen_data.rollout import AnswerSettings, Dialogue, roll_out
from stages.prompts import Prompt
from stages.targets import load_target
from tests.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_target

QUESTIONS = ("why is the sky blue?", "tell me more", "thanks \U0001f600")
# Shows at most three characters of what the assistant said before, as templates that drop reasoning do.
FORGETFUL = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'][:3] if message['role'] == 'assistant' and not loop.last else message['content'])",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("target"))), device="cpu", dtype="float32"
    )


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    folder = make_tiny_target(tmp_path_factory.mktemp("forgetful"), chat_template=FORGETFUL)
    return load_target(str(folder), device="cpu", dtype="float32")


def settings(**changes) -> AnswerSettings:
    base = {"max_new_tokens": 40, "temperature": 0.0, "top_p": 1.0, "seed": 0, "batch_size": 4}
    return AnswerSettings(**(base | changes))


def prompts(count: int, turns: int = 3) -> list[Prompt]:
    return [
        Prompt(f"p{i}", tuple(f"{i} {q}" for q in QUESTIONS[:turns]), "s", "cat", "lic") for i in range(count)
    ]


def sampled_spans(row) -> list[tuple[int, int]]:
    """[start, end) of each run of sampled ids."""
    runs = itertools.groupby(range(len(row.loss_mask)), key=row.loss_mask.__getitem__)
    return [(run[0], run[-1] + 1) for sampled, run in ((k, list(g)) for k, g in runs) if sampled]


def plain(text: str) -> str:
    """`text` without special tokens, which a random target also samples in the middle of an answer."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def answers(row) -> list[str]:
    return [message["content"] for message in row.messages if message["role"] == "assistant"]


def test_ids_are_the_template_around_the_sampled_ids(target):
    rows = roll_out(target, prompts(12), settings())
    assert [row.id for row in rows] == [f"p{i}" for i in range(12)]
    assert max(len(answers(row)) for row in rows) == 3
    eos = target.tokenizer.eos_token_id
    for row in rows:
        template = target.tokenizer.apply_chat_template(row.messages, tokenize=False)
        assert plain(template).startswith(plain(target.tokenizer.decode(row.input_ids)))
        assert row.input_ids[-1] == eos or row.finish_reason == "length"
        for start, end in sampled_spans(row)[:-1]:
            assert row.input_ids[end - 1] == eos
            assert eos not in row.input_ids[start : end - 1]


def test_text_where_the_mask_is_one_is_what_the_assistant_said(target):
    for row in roll_out(target, prompts(12), settings()):
        assert [target.decode(row.input_ids[start:end]) for start, end in sampled_spans(row)] == answers(row)


def test_each_answer_is_what_transformers_generates_behind_the_same_ids(target):
    checked = 0
    for row in roll_out(target, prompts(3), settings()):
        for start, end in sampled_spans(row):
            prefix = torch.tensor([row.input_ids[:start]])
            expected = target.model.generate(
                prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=40, do_sample=False
            )[0, start:]
            assert row.input_ids[start:end] == expected.tolist()
            checked += 1
    assert checked > 3


def test_sampled_ids_are_kept_even_if_the_tokenizer_would_choose_others(target):
    rows = roll_out(target, prompts(8), settings(temperature=1.0))
    assert len(rows) == 8
    spans = [row.input_ids[start:end] for row in rows for start, end in sampled_spans(row)[:-1]]
    assert any(target.tokenizer.encode(target.tokenizer.decode(span)) != span for span in spans)


def test_an_answer_that_was_cut_ends_the_dialogue(target):
    rows = roll_out(target, prompts(8), settings(max_new_tokens=8))
    cut = [row for row in rows if row.finish_reason == "length"]
    assert cut
    for row in cut:
        start, end = sampled_spans(row)[-1]
        assert end - start == 8
        assert end == len(row.input_ids)
        assert len(answers(row)) <= 3


def test_rows_depend_on_prompt_and_seed_only_not_on_the_batch(target):
    three = prompts(3, turns=2)
    together = roll_out(target, three, settings(temperature=0.8, top_p=0.9))
    alone = [
        row
        for p in reversed(three)
        for row in roll_out(target, [p], settings(temperature=0.8, top_p=0.9, batch_size=1))
    ]
    assert together == list(reversed(alone))
    other_seed = roll_out(target, three, settings(temperature=0.8, top_p=0.9, seed=1))
    assert all(a.input_ids != b.input_ids for a, b in zip(together, other_seed, strict=True))


def test_prompts_with_the_same_text_and_other_ids_get_other_samples(target):
    twins = [Prompt("a", QUESTIONS[:1], "s"), Prompt("b", QUESTIONS[:1], "s")]
    first, second = roll_out(target, twins, settings(temperature=1.0))
    assert first.input_ids != second.input_ids


def test_a_system_message_comes_first(target):
    (row,) = roll_out(target, [Prompt("a", ("hi",), "s", system="Be brief.")], settings())
    assert row.messages[0] == {"role": "system", "content": "Be brief."}
    assert target.tokenizer.decode(row.input_ids).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi"
    )


def test_a_template_that_rewrites_history_starts_a_row_for_the_turn_after_it(forgetful):
    rows = roll_out(forgetful, prompts(4), settings())
    assert len({row.id for row in rows}) == len(rows) > 4
    for row in rows:
        spans, said = sampled_spans(row), answers(row)[-len(sampled_spans(row)) :]
        assert [forgetful.decode(row.input_ids[start:end]) for start, end in spans] == said
        assert all(len(text) <= 3 for text in said[:-1])
        asked = [i for i, message in enumerate(row.messages) if message["role"] == "user"][-len(spans)]
        assert row.input_ids[: spans[0][0]] == forgetful.render(row.messages[: asked + 1])


def test_a_turn_that_does_not_fit_ends_the_dialogue_and_leaves_it_as_it_was(target):
    long = "long " * 300
    (row,) = roll_out(
        target, [Prompt("a", (QUESTIONS[0], long), "s"), Prompt("b", (long, "hi"), "s")], settings()
    )
    assert row.id == "a"
    assert len(answers(row)) == 1
    dialogue = Dialogue(Prompt("b", (long,), "s"))
    assert not dialogue.ask(target, room=settings().room(target))
    assert dialogue == Dialogue(Prompt("b", (long,), "s"))
