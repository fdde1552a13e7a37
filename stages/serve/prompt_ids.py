"""From what a request says to the token ids of its prompts."""

from __future__ import annotations

from stages.errors import EagleError
from stages.serve.api_error import ApiError, shown
from stages.serve.chat_prompt import ChatPrompt
from stages.serve.message import for_template
from stages.serve.request_part import invalid
from stages.serve.served_model import ServedModel
from stages.serve.tool import Tool
from stages.serve.tool_form import describe_tools


def chat_ids(model: ServedModel, chat: ChatPrompt, tools: list[Tool]) -> list[int]:
    """Token ids of a chat through the target's template, up to where the answer goes on.

    Args:
        tools: those of the chat that the target gets to see.

    Raises:
        ApiError: the template refuses the messages, or knows nothing of what it is told.
    """
    variables = chat.chat_template_kwargs or {}
    known = model.template_variables if variables else frozenset()
    if unknown := [name for name in variables if name not in known]:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        param = f"chat_template_kwargs.{unknown[0]}"
        message = f"chat_template_kwargs has {shown(unknown[0])}, which this model's template does not use"
        raise ApiError(400, f"{message}; {takes}", param=param, code="unsupported_parameter")
    messages, shown_tools = for_template(chat.messages), [tool.for_template() for tool in tools]
    asks_for_tools = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
    if asks_for_tools and not model.tool_form.described:
        messages, shown_tools = describe_tools(messages, shown_tools), []
    try:
        ids = model.target.render(
            messages,
            chat.begins_answer,
            tools=shown_tools,
            continue_final_message=bool(chat.continue_final_message),
            variables=variables,
        )
    except EagleError as error:
        raise invalid("messages", str(error)) from None
    if not ids:
        raise invalid("messages", "the messages have no tokens; add some text")
    return ids


def text_ids(model: ServedModel, prompt: str | list[int], *, special: bool = True) -> list[int]:
    """Token ids of a prompt: of text with what belongs at its start unless not `special`, ids as they are.

    Raises:
        ApiError: there are none, or one that the target lacks.
    """
    ids = model.encode(prompt, special=special) if isinstance(prompt, str) else prompt
    if not ids:
        raise invalid("prompt", "prompt has no tokens; add some text")
    model.require_ids(ids, "prompt")
    return ids
