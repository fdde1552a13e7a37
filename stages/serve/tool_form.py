"""How a target writes the calls of tools, found out from its own chat template.

The template is asked to write a call, and the forms known here are looked for in what comes out:

    tagged    <tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>   Qwen 2.5 and 3, Hermes
    listed    [TOOL_CALLS] [{"name": "f", "arguments": {}}]               Mistral until 2024
    named     [TOOL_CALLS]f[ARGS]{}                                       Mistral since
    bare      {"name": "f", "parameters": {}}                             Llama 3: a call is the whole answer

A target whose template knows no tools gets them described in a system message, and what it is made to call
has the bare form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["tagged", "listed", "named", "bare"]

_PROBE = "eagle_probe_function"
_FUNCTION = {"name": _PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}
_USER = {"role": "user", "content": "x"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}
    ],
}


@dataclass(frozen=True)
class ToolForm:
    """A form of calls.

    begin, end: what stands around a call, or around all of them; nothing in the bare form.
    key: under which name a call has its arguments.
    free: whether the target makes such calls by itself.
    described: whether its template shows it the tools.
    """

    kind: Kind
    begin: str = ""
    end: str = ""
    key: str = "arguments"
    free: bool = True
    described: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """Words that may be tokens of their own, which have no text elsewhere."""
        named = ("[ARGS]",) if self.kind == "named" else ()
        return tuple(word for word in (self.begin, self.end, *named) if len(word) > 1)


TAGGED = ToolForm("tagged", "<tool_call>", "</tool_call>")
LISTED = ToolForm("listed", "[TOOL_CALLS]", "]")
NAMED = ToolForm("named", "[TOOL_CALLS]")
LLAMA = ToolForm("bare", key="parameters")
FORCED = ToolForm("bare", free=False)
"""Of a target whose template shows tools, but whose own form of calls is none of those above."""
UNKNOWING = ToolForm("bare", free=False, described=False)
"""Of a target whose template knows no tools."""

_FORMS = (
    (r"<tool_call>\s*\{[^<]*\"%s\"", TAGGED),
    (r"\[TOOL_CALLS\]\s*\[\s*\{.*\"%s\"", LISTED),
    (r"\[TOOL_CALLS\]\s*%s\s*(\[ARGS\])?\s*\{", NAMED),
    (r"\{\s*\"name\":\s*\"%s\",\s*\"parameters\":", LLAMA),
)


def tool_form(tokenizer: Any) -> ToolForm:
    """The form of a tokenizer's chat template."""
    told = _rendered(tokenizer, [_USER])
    if told is None or _PROBE not in told:
        return UNKNOWING
    shown = (_rendered(tokenizer, [_USER, _CALL]) or "").removeprefix(told)
    for pattern, form in _FORMS:
        if re.search(pattern % _PROBE, shown, re.DOTALL):
            return form
    return FORCED


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str | None:
    """The text of messages with the probe's tool; None where the template fails on them."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False)
    except Exception:  # templates fail in ways of their own, and one that does knows no tools
        return None
    return text if isinstance(text, str) else None


def describe_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools.

    The tools are told in the system message, calls become the text that they are made of, and their results
    the words of the user.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"Result of {message['name']}: {content}"
            if found and found[-1]["role"] == "user":
                found[-1] = {"role": "user", "content": f"{found[-1]['content']}\n{content}"}
                continue
        lines = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        found.append({"role": role, "content": "\n".join([content] * bool(content) + lines)})
    if tools:
        functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        text = "\n".join(
            [
                "You can call these functions:",
                *functions,
                'To call one, answer with JSON alone: {"name": "its name", "arguments": {what it takes}}',
            ]
        )
        if found[0]["role"] == "system":
            found[0] = {"role": "system", "content": f"{found[0]['content']}\n\n{text}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found
