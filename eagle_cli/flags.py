"""Flags generated from a stage's configuration: one field is one flag, its description the help text.

A field marked `Positional` is given by its place instead: `uri` is `eagle inspect URI`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from eagle_cli.catalog import Stage
from stages import __version__
from stages.errors import EagleError

REQUIRED, OTHERS, RUNNING = "Required", "Options", "Running"
NO_BREAK = "\u00a0"

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def stage_function(stage: Stage, act: Callable[[dict[str, Any], bool, bool], int]) -> Callable[..., int]:
    """A function whose parameters are the flags of `stage`, for typer to read.

    Args:
        stage: its configuration model gives the flags; --json and --quiet are added.
        act: called with the field values, and whether --json and --quiet were given; returns the exit code.
    """
    config_class = stage.config_class()
    fields, headings = config_class.model_fields, headings_of(config_class)

    def command(**values: Any) -> int:
        chosen = {name: values[name] for name in fields}
        return act(chosen, values["json"], values["quiet"])

    parameters = [_parameter(stage, name, fields[name], heading) for name, heading in headings.items()]
    parameters += [
        _switch(
            stage, "json", "Print the result as one JSON object on stdout; everything else goes to stderr."
        ),
        _switch(stage, "quiet", "Show no progress; only the result and errors."),
    ]
    parameters += [_run_file(stage), _version()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = stage.summary
    return command


def flag(field_name: str) -> str:
    """`--max-prompts` for `max_prompts`."""
    return f"--{field_name.replace('_', '-')}"


def spelling(name: str, field: FieldInfo) -> str:
    """How a person gives a field: `--max-prompts`, or `URI` where its place says what it is."""
    return name.replace("_", "-").upper() if _is_positional(field) else flag(name)


def headings_of(config_class: type[BaseModel]) -> dict[str, str]:
    """The heading in `--help` of each field: what is required first, then the groups of the configuration.

    Its own groups precede those of its bases, so that what all stages share comes where a person looks last.
    The dictionary is in the order in which the help shows the fields.
    """
    groups: dict[str, str] = {}
    for each in config_class.__mro__:
        for heading, names in vars(each).get("help_groups", {}).items():
            for name in names:
                groups.setdefault(name, heading)
    fields = config_class.model_fields
    others = {name: OTHERS for name in fields if name not in groups}
    headings = {
        name: REQUIRED if fields[name].is_required() else heading
        for name, heading in (others | groups).items()
    }
    last = {REQUIRED: -1, RUNNING: 1}
    return dict(sorted(headings.items(), key=lambda item: last.get(item[1], 0)))


class StageCommand(TyperCommand):
    """A subcommand whose help has a section for each heading, in the order of its parameters."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(NO_BREAK, " ")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments as they are typed, without the braces of typer."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            heading = getattr(parameter, "rich_help_panel", None) or RUNNING
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append((record[0], _help_text(record[1])))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _help_text(text: str) -> str:
    """A flag's help with its default in one piece, and without "required", which its heading says."""
    text, bracket, default = text.removesuffix("  [required]").partition("  [default: ")
    return text + bracket.replace("default: ", f"default:{NO_BREAK}") + default.replace(" ", NO_BREAK)


def _is_positional(field: FieldInfo) -> bool:
    from stages.config import Positional

    return any(isinstance(each, Positional) for each in field.metadata)


def _counts_bytes(field: FieldInfo) -> bool:
    """Whether a field is `Bytes` or `Bytes | None`."""
    from stages.config import ByteCount

    parts = [each for part in get_args(field.annotation) for each in getattr(part, "__metadata__", ())]
    return any(isinstance(each, ByteCount) for each in (*field.metadata, *parts))


def _parameter(stage: Stage, name: str, field: FieldInfo, heading: str) -> inspect.Parameter:
    kind = _typer_type(field)
    default = field.get_default(call_default_factory=True)
    metavar = _metavar(kind)
    if _counts_bytes(field):
        from stages.config import format_bytes

        metavar, default = "<bytes>", None if default is None else format_bytes(default)
    shared: dict[str, Any] = {
        "help": field.description,
        "envvar": stage.environment_variable(name),
        "show_envvar": False,
        "show_default": default is not False and default != "",
        "rich_help_panel": heading,
    }
    place: Any
    if _is_positional(field):
        place = typer.Argument(metavar=spelling(name, field), **shared)
    else:
        spelled = flag(name)
        place = typer.Option(
            f"{spelled}/--no-{spelled.removeprefix('--')}" if kind is bool else spelled,
            metavar=metavar,
            **shared,
        )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, place],
        default=inspect.Parameter.empty if field.is_required() else _plain(default),
    )


def _metavar(kind: Any) -> str | None:
    """`<str>...` for a flag that may be given several times, `<str> <str>` for one that takes two values."""
    for part in (kind, *get_args(kind)):
        if get_origin(part) is tuple:
            return " ".join(f"<{each.__name__}>" for each in get_args(part))
    return f"<{get_args(kind)[0].__name__}>..." if get_origin(kind) is list else None


def _run_file(stage: Stage) -> inspect.Parameter:
    def read(context: typer.Context, file: str | None) -> None:
        from eagle_cli.run_file import read_run_file

        if file is not None:
            try:
                context.default_map = read_run_file(file, stage.name, stage.config_class())
            except EagleError as error:
                raise typer.BadParameter(str(error)) from None

    option = typer.Option(
        "--config",
        help="File with flags, as YAML, JSON or the manifest.json of an artifact; flags and variables win.",
        metavar="<file>",
        callback=read,
        is_eager=True,
        rich_help_panel=RUNNING,
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str | None, option], default=None
    )


def _version() -> inspect.Parameter:
    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"eagle {__version__}")
            raise typer.Exit

    option = typer.Option(
        "--version", help="Print the version.", callback=show, is_eager=True, show_default=False
    )
    return inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, option], default=False
    )


def _switch(stage: Stage, name: str, help_text: str) -> inspect.Parameter:
    option = typer.Option(
        flag(name),
        help=help_text,
        envvar=stage.environment_variable(name),
        show_envvar=False,
        rich_help_panel=RUNNING,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, option], default=False
    )


def _typer_type(field: FieldInfo) -> Any:
    """The type typer parses: text for bytes, which the configuration reads, and lists for tuples."""
    return str | None if _counts_bytes(field) else _without_tuples(field.annotation)


def _without_tuples(annotation: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and arguments[1:] == (...,):
        return list[arguments[0]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType) and any(get_origin(part) is tuple for part in arguments):
        return Union[tuple(_without_tuples(part) for part in arguments)]  # noqa: UP007
    return annotation


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
