"""What is wrong with what a person typed, in one line that names the flag, the value and what to do."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle_cli.catalog import STAGES
from eagle_cli.flags import spelling

if TYPE_CHECKING:
    import typer
    from pydantic import BaseModel, ValidationError

ROOT = "eagle"

_PLAINER = (
    (r"^Value error, ", ""),
    (r"^'.*' is not one of (.*?)\.?$", lambda match: f"must be one of {match[1].replace(chr(39), '')}"),
    (r"^Input should be a valid number.*$", "must be a number"),
    (r"^Input should be a valid integer.*$", "must be a whole number"),
    (r"^Input should be greater than or equal to ", "must be at least "),
    (r"^Input should be less than or equal to ", "must be at most "),
    (r"^String should have at least 1 character$", "must not be empty"),
    (r"^(Input should|String should|Value should) ", "must "),
)


def describe_values(error: ValidationError, config_class: type[BaseModel]) -> str:
    """What a configuration's own check found."""
    findings = []
    for finding in error.errors(include_url=False):
        message = plainer(finding["msg"])
        where = finding["loc"][:1]
        if where and (field := config_class.model_fields.get(str(where[0]))):
            message = f"{spelling(str(where[0]), field)} {_as_typed(finding['input'])}: {message}"
        findings.append(" ".join(message.split()))
    return "; ".join(findings)


def _as_typed(given: Any) -> str:
    """A value of a flag, or several, quoted where it could not be seen otherwise."""
    values = given if isinstance(given, list | tuple) else [given]
    return " ".join(str(value) if str(value).strip() else f"'{value}'" for value in values)


def describe_arguments(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """What is wrong with the arguments themselves, and where to look."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else _command(arguments)
    where = "the commands" if command == ROOT else "the flags"
    return f"{_finding(error, context, arguments).rstrip('.')} ({command} --help lists {where})"


def plainer(message: str) -> str:
    """A finding of pydantic or typer as it would be said."""
    for pattern, said in _PLAINER:
        message = re.sub(pattern, said, message)
    return message


def _finding(error: Any, context: Any, arguments: Sequence[str]) -> str:
    if hasattr(error, "param_type"):
        missing = [_spelled(parameter) for parameter in _missing(context)] or [_spelled(error.param)]
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if (parameter := getattr(error, "param", None)) is not None:
        return f"{_spelled(parameter)}{_given(parameter, arguments, context)}: {plainer(str(error.message))}"
    typed = getattr(error, "option_name", None)
    if typed is None:
        message = error.format_message()
        extra = re.match(r"^Got unexpected extra argument\(?s?\)? \((.*)\)$", message)
        return _unexpected(extra[1], context, arguments) if extra else message
    if not hasattr(error, "possibilities"):
        wanted = re.search(r"requires (?:(\d+) arguments|an argument)", error.format_message())
        if wanted is None:
            return str(error.format_message())
        return (
            f"{typed} needs {wanted[1]} values, parted by a space" if wanted[1] else f"{typed} needs a value"
        )
    if context and context.command_path == ROOT and (stage := _stage(arguments)):
        return f"No such option: {typed} before the command, its flags come after it: {ROOT} {stage} {typed}"
    return f"No such option: {typed}{_near_flag(typed, error.possibilities)}"


def _near_flag(typed: str, known: Sequence[str] | None) -> str:
    """The flag that an unknown one is most like, as a question."""
    flags = [name for name in known or () if not name.startswith("--no-")]
    near = difflib.get_close_matches(typed, flags, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def _missing(context: Any) -> list[Any]:
    """What is required and neither typed nor in the environment or the run file. Typer names only the "
    "first."""
    if context is None:
        return []
    return [
        parameter
        for parameter in context.command.params
        if parameter.required
        and context.params.get(parameter.name) in (None, [], ())
        and not os.environ.get(parameter.envvar or "")
        and parameter.name not in (context.default_map or ())
    ]


def _spelled(parameter: Any) -> str:
    """`--max-prompts`, or `URI` for what is given by its place."""
    name: str = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
    return name


def _given(parameter: Any, arguments: Sequence[str], context: Any) -> str:
    """The value as it was typed, or as the environment or the run file has it, with a space before it; "" if
    not seen."""
    name = _spelled(parameter)
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return f" {arguments[i + 1]}"
        if argument.startswith(f"{name}="):
            return f" {argument.removeprefix(name)[1:]}"
    value = os.environ.get(parameter.envvar or "")
    if value:
        return f" {value} (from {parameter.envvar})"
    read = (context.default_map or {}).get(parameter.name) if context else None
    values = " ".join(read) if isinstance(read, list) else read
    return f" {values} (from --config)" if values else ""


def _unexpected(extra: str, context: Any, arguments: Sequence[str]) -> str:
    """An argument too many; often the second value of a flag that is given once a value."""
    first = extra.split()[0]
    before = arguments[: arguments.index(first)] if first in arguments else ()
    flag = next((argument for argument in reversed(before) if argument.startswith("-")), None)
    for parameter in context.command.params if context else ():
        if flag in parameter.opts and getattr(parameter, "multiple", False):
            return f"Unexpected argument: {extra}; each value needs its own {flag}: {flag} {first}"
    return f"Unexpected argument: {extra}"


def _command(arguments: Sequence[str]) -> str:
    stage = _stage(arguments)
    return f"{ROOT} {stage}" if stage else ROOT


def _stage(arguments: Sequence[str]) -> str | None:
    names = {stage.name for stage in STAGES}
    return next((argument for argument in arguments if argument in names), None)
