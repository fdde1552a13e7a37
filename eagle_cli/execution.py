"""Runs one stage and turns its end, whatever it is, into output and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import Any

import typer

from eagle_cli import environment
from eagle_cli.catalog import Stage
from eagle_cli.memory import wanting
from eagle_cli.usage import describe_values
from stages.errors import EagleError

DONE, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
RESULT_WIDTH = 110


class Terminated(BaseException):
    """SIGTERM arrived; passes every `except Exception` like KeyboardInterrupt does."""


def execute(stage: Stage, values: dict[str, Any], as_json: bool, quiet: bool) -> int:
    """Runs a stage and prints its result on stdout; everything else the process writes goes to stderr.

    Returns:
        0 done; 1 something the user can cause, in one line; 2 wrong usage; 130 and 143 stopped by a signal.

    Raises:
        Exception: a bug, with its traceback on stderr.
    """
    environment.prepare(quiet=quiet)
    from pydantic import ValidationError

    from stages.progress import Reporter

    config_class = stage.config_class()
    try:
        config = config_class(**values)
    except ValidationError as error:
        return fail(
            f"{describe_values(error, config_class)} (eagle {stage.name} --help lists the flags)",
            USAGE,
            as_json,
        )
    except EagleError as error:
        return fail(str(error), FAILED, as_json)
    try:
        with stdout_kept_clean(), termination_raised():
            result = stage.run()(config, Reporter(quiet=quiet))
    except EagleError as error:
        if lack := wanting(error.__cause__):
            return fail(f"{lack}: {stage.spare_memory}", FAILED, as_json)
        if error.result is not None and not as_json:
            show(error.result.summary())
        return fail(str(error), FAILED, as_json, error.result)
    except KeyboardInterrupt:
        return fail(f"interrupted; {stage.when_stopped}", INTERRUPTED, as_json)
    except Terminated:
        return fail(f"terminated; {stage.when_stopped}", TERMINATED, as_json)
    except Exception as error:
        if lack := wanting(error):
            return fail(f"{lack}: {stage.spare_memory}", FAILED, as_json)
        traceback.print_exc()
        return fail(f"this is a bug in eagle: {type(error).__name__}: {error}", FAILED, as_json)
    if result is None:  # another process of the same run has it
        return DONE
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        show(result.summary())
    return DONE


def fail(message: str, code: int, as_json: bool, result: Any = None) -> int:
    """Says what went wrong in one line on stderr, with --json as an object on stdout too; returns `code`.

    Args:
        result: what there is to show besides; its fields stand beside `error` in the object.
    """
    line = " ".join(message.split())
    with suppress(OSError):  # nobody can be told
        typer.echo(f"error: {line}", err=True)
    if as_json:
        found = {} if result is None else result.model_dump(mode="json")
        typer.echo(json.dumps({"error": line} | found))
    return code


def show(summary: Any) -> None:
    """Prints a stage's summary, text or a rich renderable, on stdout."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(summary, markup=False, highlight=False, soft_wrap=isinstance(summary, str))
        return
    # Tables are padded to their width, which a file or a pipe has no use for.
    console = Console(width=None if "COLUMNS" in os.environ else RESULT_WIDTH)
    with console.capture() as captured:
        console.print(summary, markup=False, highlight=False, soft_wrap=isinstance(summary, str))
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Sends what anything in this process, native code and children too, writes to stdout to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def termination_raised() -> Iterator[None]:
    """Turns SIGTERM into `Terminated`, so that a stage leaves through its context managers."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
