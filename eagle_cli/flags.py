"""Flags generated from a stage's configuration: one field is one flag, its description the help text."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer

from eagle_cli.catalog import Stage
from stages import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo


def stage_function(stage: Stage, act: Callable[[dict[str, Any], bool, bool], int]) -> Callable[..., int]:
    """A function whose parameters are the flags of `stage`, for typer to read.

    Args:
        stage: its configuration model gives the flags; --json and --quiet are added.
        act: called with the field values, and whether --json and --quiet were given; returns the exit code.
    """
    fields = _own_fields_first(stage.config_class())

    def command(**values: Any) -> int:
        chosen = {name: values[name] for name in fields}
        return act(chosen, values["json"], values["quiet"])

    parameters = [_parameter(stage, name, field) for name, field in fields.items()]
    parameters += [
        _switch(
            stage, "json", "Print the result as one JSON object on stdout; everything else goes to stderr."
        ),
        _switch(stage, "quiet", "Show no progress; only the result and errors."),
    ]
    parameters.append(_version())
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = stage.summary
    return command


def flag(field_name: str) -> str:
    """`--max-prompts` for `max_prompts`."""
    return f"--{field_name.replace('_', '-')}"


def describe(error: ValidationError, config_class: type[BaseModel]) -> str:
    """What a configuration's check found, in one line that names the flags."""
    findings = []
    for finding in error.errors(include_url=False):
        message = finding["msg"].removeprefix("Value error, ")
        where = finding["loc"][:1]
        if where and where[0] in config_class.model_fields:
            message = f"{flag(str(where[0]))} {finding['input']}: {message}"
        findings.append(" ".join(message.split()))
    return "; ".join(findings)


def _own_fields_first(config_class: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields with those that all stages share at the end, where a person looks last."""
    from stages.config import CommonConfig

    own = {
        name: field
        for name, field in config_class.model_fields.items()
        if name not in CommonConfig.model_fields
    }
    return own | dict(config_class.model_fields)


def _parameter(stage: Stage, name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _typer_type(field.annotation)
    spelled = flag(name)
    declaration = f"{spelled}/--no-{spelled.removeprefix('--')}" if kind is bool else spelled
    option = typer.Option(
        declaration,
        help=field.description,
        envvar=stage.environment_variable(name),
        show_envvar=False,
        metavar=f"<{get_args(kind)[0].__name__}>..." if get_origin(kind) is list else None,
    )
    default = field.get_default(call_default_factory=True)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, option],
        default=inspect.Parameter.empty if field.is_required() else _plain(default),
    )


def _version() -> inspect.Parameter:
    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"eagle {__version__}")
            raise typer.Exit

    option = typer.Option("--version", help="Print the version.", callback=show, is_eager=True)
    return inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, option], default=False
    )


def _switch(stage: Stage, name: str, help_text: str) -> inspect.Parameter:
    option = typer.Option(
        flag(name), help=help_text, envvar=stage.environment_variable(name), show_envvar=False
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, option], default=False
    )


def _typer_type(annotation: Any) -> Any:
    """The type typer parses: tuples of any length become lists, the rest is taken as it is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and arguments[1:] == (...,):
        return list[arguments[0]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType) and any(get_origin(part) is tuple for part in arguments):
        return Union[tuple(_typer_type(part) for part in arguments)]  # noqa: UP007
    return annotation


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
