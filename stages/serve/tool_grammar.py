"""The calls of tools as a grammar, in llguidance's variant of Lark and the form that the target writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stages.serve.tool import Tool
from stages.serve.tool_form import ToolForm

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # known to its type stubs only

ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def calls_grammar(form: ToolForm, tools: Sequence[Tool], tokenizer: Any, *, must: bool, one: bool) -> str:
    """What an answer may be.

    Where calls are the model's choice, arguments of functions that are not `strict` are any object.

    Args:
        must: nothing but calls; otherwise text with calls in it, in the bare form text or calls.
        one: a single call.
    """
    lines = []
    for i, tool in enumerate(tools):
        function = tool.function
        strict = must or function.strict is True
        schema = function.schema_of_arguments if strict else {"type": "object"}
        lines.append(f"args_{i}: %json {json.dumps({**schema, 'x-guidance': ONE_LINE})}")
        if form.kind == "named":
            name = f"{quoted(function.name)} {_marker('[ARGS]', tokenizer)} args_{i}"
        else:
            start = f'{{"name": {json.dumps(function.name)}, "{form.key}": '
            name = f"{quoted(start)} args_{i} {quoted('}')}"
        lines.append(f"call_{i}: {name}")
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    begin, end = _marker(form.begin, tokenizer), _marker(form.end, tokenizer)
    body = {
        "tagged": rf'"\n" call "\n" {end}',
        "listed": '" [" call "]"' if one else '" [" call (", " call)* "]"',
        "named": "call",
        "bare": "call" if one else r'call ("\n" call)*',
    }[form.kind]
    return "\n".join([*_start(form, begin, body, _spoken(form, tokenizer), must=must, one=one), *lines])


def _start(
    form: ToolForm, begin: str, body: str, spoken: Sequence[str], *, must: bool, one: bool
) -> list[str]:
    """The rules of the whole answer; `spoken` are tokens that text may have besides characters."""
    if not form.begin:
        # Text is what does not begin as a call does.
        return [f"start: {body}"] if must else [f"start: {body} | TEXT", r"TEXT: /([^{ \t\r\n](.|\n)*)?/"]
    if must:
        between = r'"\n"' if form.kind == "tagged" else ""
        again = "" if one or form.kind == "listed" else f"({between} calls)*"
        return [f"start: calls {again}", f"calls: {begin} {body}"]
    if begin.startswith("<["):
        text = ["text: (" + " | ".join(["TEXT", *spoken]) + ")*", r"TEXT: /(.|\n)+/"]
        return ["start: text (calls text)*", f"calls: {begin} {body}", *text]
    # A marker that is no token of its own ends the text before it.
    head = ["start: (head calls)* TEXT", f"head[lazy]: TEXT {begin}", r"TEXT: /(.|\n)*/"]
    return [*head, f"calls: {body}"]


def _spoken(form: ToolForm, tokenizer: Any) -> list[str]:
    """Tokens of their own that are part of an answer's text, such as those around its thoughts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [f"<[{i}]>" for i, t in added.items() if not t.special and t.content not in form.markers]


def _marker(word: str, tokenizer: Any) -> str:
    """A word as a grammar names it: by its id where it is a token of its own."""
    added = getattr(tokenizer, "added_tokens_encoder", {})
    return f"<[{added[word]}]>" if word in added else quoted(word)


def quoted(text: str) -> str:
    """Text as a grammar writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
