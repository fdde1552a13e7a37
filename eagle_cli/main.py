"""`eagle`: a lazy command group, so that `eagle --help` imports no stage."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eagle_cli.catalog import STAGES, Stage
from eagle_cli.execution import FAILED, execute, fail
from eagle_cli.flags import StageCommand, stage_function
from eagle_cli.streams import drop_stdout, open_closed_streams
from eagle_cli.usage import describe_arguments
from stages import __version__

CONTEXT = {"max_content_width": 110, "help_option_names": ["--help", "-h"]}


class StageCommands(MutableMapping[str, Any]):
    """The subcommands by name, each made from its stage's configuration when first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = stage_command({stage.name: stage for stage in STAGES}[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(stage.name for stage in STAGES)

    def __len__(self) -> int:
        return len(STAGES)


class StageGroup(TyperGroup):
    """The root command; lists the stages from the catalog instead of making their commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": StageCommands()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(len(stage.name) for stage in STAGES)
        for section in dict.fromkeys(stage.section for stage in STAGES):
            with formatter.section(section):
                members = [stage for stage in STAGES if stage.section == section]
                formatter.write_dl([(stage.name.ljust(widest), stage.summary) for stage in members])


app = typer.Typer(
    cls=StageGroup,
    add_completion=False,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> int:
    """Makes an LLM answer faster with exactly the same text: trains a draft head, serves it, proves it.

    The stages run in this order; each reads and writes artifacts at local paths or URIs such as gs://bucket/folder.
    """
    if version:
        typer.echo(f"eagle {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs `eagle` with the given or the process's arguments and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    open_closed_streams()
    try:
        code: int = typer.main.get_command(app).main(arguments, prog_name="eagle", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return fail(describe_arguments(error, arguments), error.exit_code, "--json" in arguments)
    except BrokenPipeError:  # `| head`
        drop_stdout()
        return FAILED
    except OSError as error:  # a stage's own do not come this far
        drop_stdout()
        return fail(f"the output cannot be written to stdout ({error.strerror})", FAILED, as_json=False)
    return code


def stage_command(stage: Stage) -> Any:
    """The subcommand of a stage, with a flag for each field of its configuration."""
    single = typer.Typer(
        add_completion=False,
        context_settings=CONTEXT,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    epilog = f"Every flag can also be set in the environment: --json as {stage.environment_variable('json')}."
    single.command(stage.name, cls=StageCommand, epilog=epilog)(
        stage_function(stage, functools.partial(execute, stage))
    )
    return typer.main.get_command(single)
