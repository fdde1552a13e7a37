"""A chat template of the user's own, for targets that bring none or another one."""

from __future__ import annotations

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.targets.target import Target


def with_chat_template(target: Target, file: str | None) -> Target:
    """The target with the template in a local or remote file; as it is where `file` is None.

    The template is part of the target's identity, so what was made with one is used with the same one.

    Raises:
        EagleError: the file cannot be read, or is no Jinja template.
    """
    if file is None:
        return target
    fs, path = filesystem(file)
    with storage_errors(file):
        data = bytes(fs.cat_file(path))
    try:
        target.tokenizer.chat_template = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise EagleError(f"--chat-template {file} is not text in UTF-8") from None
    import jinja2

    try:
        target.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise EagleError(
            f"--chat-template {file} is no Jinja template, line {error.lineno}: {error.message}"
        ) from None
    except jinja2.TemplateError as error:
        raise EagleError(f"--chat-template {file} refuses a first message: {error}") from None
    return target
