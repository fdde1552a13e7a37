"""A chat template of the user's own, for targets that bring none or another one."""

from __future__ import annotations

from typing import Any

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.targets.target import Target, TemplateRefusalError

_PROBE = "Hello"


def with_chat_template(target: Target, file: str | None) -> Target:
    """The target with the template in a local or remote file; as it is where `file` is None.

    The template is part of the target's identity, so what was made with one is used with the same one.

    Raises:
        EagleError: the file cannot be read, is no Jinja template, or does not show what is said.
    """
    if file is None:
        return target
    fs, path = filesystem(file)
    with storage_errors(file):
        data = bytes(fs.cat_file(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise EagleError(f"--chat-template {file} is not text in UTF-8") from None
    if not text.strip():
        raise EagleError(f"--chat-template {file} is empty: give a file with a Jinja template")
    target.tokenizer.chat_template = text
    import jinja2

    try:
        refuse_silent(target, f"--chat-template {file}")
    except TemplateRefusalError as error:
        cause = error.__cause__
        if isinstance(cause, jinja2.TemplateSyntaxError):
            raise EagleError(
                f"--chat-template {file} is no Jinja template, line {cause.lineno}: {cause.message}"
            ) from None
        raise EagleError(f"--chat-template {file} refuses a first message: {cause}") from None
    return target


def refuse_silent(target: Target, what: str) -> None:
    """Refuses a template that shows nothing of the chat, such as a file that is none.

    Args:
        what: how to call it.

    Raises:
        EagleError: it shows nothing of what a user says.
        TemplateRefusalError: it refuses a first message.
    """
    chat = [{"role": "user", "content": _PROBE}]
    target.render(chat)
    shown = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    if _PROBE not in shown:
        raise EagleError(
            f"{what} does not show what the user says: give a Jinja template that writes the messages"
        )


# What a template gets in any case: the chat, the names of transformers' own arguments, and functions.
_GIVEN = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "conversations",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "raise_exception",
        "strftime_now",
        "self",
        "kwargs",
    ]
)


def template_variables(target: Target) -> frozenset[str]:
    """Variables that the target's chat template asks for besides the chat, such as `enable_thinking`.

    Raises:
        EagleError: the template cannot be read.
    """
    import jinja2
    import jinja2.ext
    from jinja2 import meta, nodes
    from jinja2.parser import Parser

    class Generation(jinja2.ext.Extension):
        """transformers' mark around what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols, Generation])
    found: set[str] = set()
    for template in _templates(target):
        try:
            found |= meta.find_undeclared_variables(environment.parse(template))
        except jinja2.TemplateSyntaxError as error:
            raise EagleError(
                f"the chat template of {target.name} is no Jinja template: {error.message}"
            ) from None
    return frozenset(found) - _GIVEN - set(target.tokenizer.special_tokens_map) - set(environment.globals)


def _templates(target: Target) -> list[Any]:
    """Some tokenizers have one for chats with tools besides."""
    template = target.tokenizer.chat_template or {}
    return [template] if isinstance(template, str) else list(template.values())
