from __future__ import annotations

import itertools

import pytest
import torch

from stages.decoding import GenerationResult
from stages.gen_data.engines.engine import TransformersEngine
from stages.gen_data.rollout import AnswerSettings, Dialogue, is_degenerate
from stages.gen_data.rollout import roll_out as roll_out_fully
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


def settings(*temperatures: float, **changes) -> AnswerSettings:
    base = {"max_new_tokens": 40, "top_p": 1.0, "seed": 0, "batch_size": 4}
    return AnswerSettings(temperatures=temperatures or (0.0,), **(base | changes))


def prompts(count: int, turns: int = 3) -> list[Prompt]:
    return [
        Prompt(f"p{i}", tuple(f"{i} {q}" for q in QUESTIONS[:turns]), "s", "cat", "lic") for i in range(count)
    ]


def rolled_out(target, prompts, settings):
    return roll_out_fully(target, prompts, settings, TransformersEngine(target, settings.batch_size))


def roll_out(target, prompts, settings):
    return rolled_out(target, prompts, settings).rows


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
    found = rolled_out(target, prompts(12), settings())
    rows = found.rows
    assert len(rows) == 12 - found.left_out.get("s", {}).get("degenerate", 0) >= 10
    assert [row.id for row in rows] == sorted((row.id for row in rows), key=lambda name: int(name[1:]))
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
    rows = roll_out(target, prompts(8), settings(1.0))
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
    together = roll_out(target, three, settings(0.8, top_p=0.9))
    alone = [
        row for p in reversed(three) for row in roll_out(target, [p], settings(0.8, top_p=0.9, batch_size=1))
    ]
    assert together == list(reversed(alone))
    other_seed = roll_out(target, three, settings(0.8, top_p=0.9, seed=1))
    assert all(a.input_ids != b.input_ids for a, b in zip(together, other_seed, strict=True))


def test_of_several_temperatures_each_prompt_has_one_and_each_of_its_samples_the_next(target):
    def answered(*temperatures: float, **changes) -> dict[str, list[int]]:
        rows = roll_out(target, prompts(12, turns=1), settings(*temperatures, **changes))
        return {row.id: row.input_ids for row in rows}

    greedy, hot, mixed = answered(0.0), answered(1.0), answered(0.0, 1.0)
    was_greedy = [ids == greedy.get(name) for name, ids in mixed.items()]
    assert set(was_greedy) == {True, False}
    assert all(ids in (greedy.get(name), hot.get(name)) for name, ids in mixed.items())
    twice = answered(0.0, 1.0, samples=2)
    assert all(ids in (twice.get(name), twice.get(f"{name}@2")) for name, ids in greedy.items())


def test_prompts_with_the_same_text_and_other_ids_get_other_samples(target):
    twins = [Prompt("a", QUESTIONS[:1], "s"), Prompt("b", QUESTIONS[:1], "s")]
    first, second = roll_out(target, twins, settings(1.0))
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
    assert dialogue == Dialogue(Prompt("b", (long,), "s"), ended="no_room")


def test_the_context_can_be_made_shorter(target):
    rows = roll_out(target, prompts(6), settings(max_model_len=100))
    assert rows
    assert (
        max(len(row.input_ids) for row in rows)
        <= 100
        < max(len(row.input_ids) for row in roll_out(target, prompts(6), settings()))
    )


def test_answers_that_were_cut_can_be_left_out_with_their_questions(target):
    kept, cut = rolled_out(target, prompts(8), settings(max_new_tokens=8)), 0
    dropped = rolled_out(target, prompts(8), settings(max_new_tokens=8, drop_truncated=True))
    assert all(row.finish_reason == "stop" for row in dropped.rows)
    by_id = {row.id: row for row in dropped.rows}
    for row in kept.rows:
        if row.finish_reason == "length":
            cut += 1
            earlier = answers(row)[:-1]
            assert (answers(by_id[row.id]) if row.id in by_id else []) == earlier
            if earlier:
                assert by_id[row.id].input_ids == row.input_ids[: len(by_id[row.id].input_ids)]
    assert dropped.ended["truncated"] == cut == kept.ended["cut"]
    assert sum(dropped.left_out["s"].values()) == 8 - len(by_id) > 0


def test_several_answers_to_a_prompt_differ_and_the_first_is_the_only_one_of_a_run_without(target):
    once = roll_out(target, prompts(3), settings(1.0))
    twice = roll_out(target, prompts(3), settings(1.0, samples=2))
    assert [row.id for row in twice] == ["p0", "p0@2", "p1", "p1@2", "p2", "p2@2"]
    assert twice[::2] == once
    assert all(a.input_ids != b.input_ids for a, b in zip(twice[::2], twice[1::2], strict=True))


@pytest.mark.parametrize(
    ("ids", "text", "degenerate"),
    [
        ([2], "", True),
        ([5, 2], " \n", True),
        ([5, 2], "\u200b\n", True),
        ([7] * 32, "a" * 32, True),
        ([5, 6, *[7] * 32], "b" * 34, True),
        ([7] * 31, "a" * 31, False),
        ([*[7] * 40, 2], "a" * 40, False),
        ([5, 6, 2], "hi", False),
    ],
)
def test_answers_that_say_nothing_or_loop_are_none(ids, text, degenerate):
    assert is_degenerate(ids, text) == degenerate


def test_a_degenerate_answer_ends_the_dialogue_and_is_taken_back(target):
    eos = target.tokenizer.eos_token_id
    dialogue = Dialogue(Prompt("a", QUESTIONS, "s"))
    assert dialogue.ask(target, 500)
    dialogue.hear(target, GenerationResult("a", [*target.tokenizer.encode("fine"), eos], "stop"))
    before = (list(dialogue.input_ids), list(dialogue.loss_mask), list(dialogue.messages))
    assert dialogue.ask(target, 500)
    dialogue.hear(target, GenerationResult("a", [eos], "stop"))
    assert (dialogue.input_ids, dialogue.loss_mask, dialogue.messages) == before
    assert dialogue.ended == "degenerate"
    assert not dialogue.ask(target, 500)
    assert len(dialogue.conversations()) == 1


def load(folder, template: str):
    return load_target(str(make_tiny_target(folder, chat_template=template)), device="cpu", dtype="float32")


def test_a_template_that_refuses_a_system_message_leaves_the_prompt_out(tmp_path):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    target = load(tmp_path, refusal + CHAT_TEMPLATE)
    asked = [Prompt("a", ("hi",), "s", system="Be brief."), Prompt("b", ("hi",), "s")]
    found = rolled_out(target, asked, settings())
    assert [row.id for row in found.rows] == ["b"]
    assert found.left_out == {"s": {"refused_by_template": 1}}


@pytest.mark.parametrize(
    "failure",
    [
        "{{ 1 // (messages | length - 1) }}",
        "{{ 'x'.nothing() }}",
        "{{ range(10 ** 10) }}",
        "{{ messages[0] + 1 }}",
        "{{ {}.pop('x') }}",
    ],
)
def test_a_template_that_fails_leaves_the_prompt_out_and_says_why(tmp_path, failure):
    target = load(tmp_path, failure + CHAT_TEMPLATE)
    dialogue = Dialogue(Prompt("a", ("hi",), "s"))
    assert not dialogue.ask(target, 500)
    assert dialogue.ended == "refused_by_template"
    assert dialogue.refusal.startswith(f"the chat template of {target.name} refuses the messages: ")


def test_a_text_of_more_characters_than_any_tokenizer_could_fit_is_not_tokenized():
    dialogue = Dialogue(Prompt("a", ("x" * 2561,), "s"))
    assert not dialogue.ask(object(), room=10)  # no target at all
    assert dialogue.ended == "no_room"


def test_tools_are_shown_as_the_template_shows_them(tmp_path):
    tools = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    target = load(tmp_path, tools + CHAT_TEMPLATE)
    [row] = roll_out(target, [Prompt("a", ("hi",), "s", tools='[{"name": "clock"}]')], settings())
    shown = '<|im_start|>tools\n[{"name": "clock"}]<|im_end|>\n<|im_start|>user\nhi'
    assert target.tokenizer.decode(row.input_ids).startswith(shown)
