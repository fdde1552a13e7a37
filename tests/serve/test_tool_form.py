"""Which form of calls a chat template has, and that the grammar of each form gives what is read back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from stages.serve.grammar import Grammars
from stages.serve.tool import Tool
from stages.serve.tool_calls import ToolCallReader
from stages.serve.tool_form import FORCED, LISTED, LLAMA, NAMED, TAGGED, UNKNOWING, ToolForm, tool_form
from stages.targets import Target
from tests.serve import tool_templates
from tests.tiny import CHAT_TEMPLATE

TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in (
        {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "$defs": {"unit": {"enum": ["C", "F"]}},
                "type": "object",
                "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "maximum": 9}},
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
        {"name": "stop"},
    )
]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (tool_templates.TAGGED, TAGGED),
        (tool_templates.TAGGED_NAME_LAST, TAGGED),
        (tool_templates.LISTED, LISTED),
        (tool_templates.NAMED, NAMED),
        (tool_templates.BARE, LLAMA),
        (tool_templates.XML, FORCED),
        (CHAT_TEMPLATE, UNKNOWING),
        ("{{ raise_exception('no') }}", UNKNOWING),
    ],
)
def test_the_form_is_found_in_what_the_template_writes(
    tiny_folder: Path, template: str, form: ToolForm
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = template
    assert tool_form(tokenizer) == form


def walk(mask: Any, tokenizer: Any, eos: int, seed: int) -> list[int]:
    """Ids of an answer that the mask allows: mostly single characters, so that it ends soon."""
    rng, output = random.Random(seed), []
    while True:
        allowed = mask(output).nonzero().flatten().tolist()
        if eos in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return output
        output.append(rng.choice([token for token in allowed if token != eos]))
        assert len(output) < 400, tokenizer.decode(output)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(
    "form", [TAGGED, LISTED, NAMED, LLAMA, UNKNOWING], ids=lambda form: form.kind + form.key
)
def test_what_the_grammar_allows_is_read_as_calls_that_follow_their_schemas(
    target: Target, tiny_folder: Path, form: ToolForm, one: bool, as_tokens: bool
) -> None:
    """Whether the markers are tokens of their own or letters."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    if as_tokens:
        tokenizer.add_tokens([AddedToken(word) for word in form.markers])
    grammars = Grammars(with_tokenizer(target, tokenizer))
    several = 0
    for seed in range(4):
        ids = walk(grammars.calls(form, TOOLS, must=True, one=one), tokenizer, tokenizer.eos_token_id, seed)
        reader = ToolCallReader(form, ["get_weather", "stop"])
        assert reader.push(tokenizer.decode(ids)) + reader.close() == ""
        assert len(reader.calls) == 1 or not one
        several += len(reader.calls) > 1
        for call in reader.calls:
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert arguments["unit"] in ("C", "F")
                assert arguments["days"] <= 9
            else:
                assert arguments == {}
    assert one or several


@pytest.mark.parametrize("form", [TAGGED, LISTED, NAMED, LLAMA], ids=lambda form: form.kind)
@pytest.mark.parametrize("as_tokens", [False, True])
def test_where_a_call_is_the_models_choice_text_is_free_and_strict_calls_follow_their_schemas(
    target: Target, tiny_folder: Path, form: ToolForm, as_tokens: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    if as_tokens:
        tokenizer.add_tokens([AddedToken(word) for word in (*form.markers, "<think>")])
    grammars = Grammars(with_tokenizer(target, tokenizer))

    def allows(text: str, more: str) -> bool:
        """Whether the first id of `more` may follow `text`."""
        mask = grammars.calls(form, TOOLS, must=False, one=False)
        ids, following = (tokenizer.encode(each, add_special_tokens=False) for each in (text, more))
        for i, token in enumerate(ids):
            if not mask(ids[:i])[token]:
                return False
        return bool(mask(ids)[following[0] if more else tokenizer.eos_token_id])

    start = {
        "tagged": '<tool_call>\n{"name": "%s", "arguments": ',
        "listed": '[TOOL_CALLS] [{"name": "%s", "arguments": ',
        "named": "[TOOL_CALLS]%s[ARGS]",
        "bare": '{"name": "%s", "parameters": ',
    }[form.kind]
    text = "" if form.kind == "bare" else "Let me see.\n"
    assert allows("It rains: {", "")
    assert allows("", "")
    assert allows(text + start % "get_weather", '{"unit": ')
    assert not allows(text + start % "get_weather", "[")
    assert not allows(text + start % "get_weather" + '{"', "other")
    assert allows(text + start % "stop" + '{"', "other"), "not strict, so any object"
    assert not allows(text + start % "unknown", "{")
    if as_tokens and form.begin:
        assert allows("<think>well", "")


def with_tokenizer(target: Target, tokenizer: Any) -> Any:
    """The target with added tokens, whose rows its model need not have for a grammar."""

    class Tokenized:
        name, eos_ids = target.name, target.eos_ids
        vocab_size = len(tokenizer)

    found = Tokenized()
    found.tokenizer = tokenizer  # type: ignore[attr-defined]
    return found
