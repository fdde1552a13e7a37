"""Reading prompts: a source, wherever it is and whatever its rows look like, becomes a stream of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stages.artifacts.uri import local_path
from stages.errors import EagleError
from stages.prompts.files import COMPRESSIONS, FILE_TYPES, Row, expand, file_rows, is_prompt_file
from stages.prompts.hub import hub_id, hub_rows
from stages.prompts.prompt import Prompt, Rejected
from stages.prompts.shapes import read_row

BUILTIN = "builtin:"


def read_prompts(src: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a source, all of them by default.

    Args:
        src: as `iter_prompts`.

    Raises:
        EagleError: as `iter_prompts`, or a row is no prompt.
    """
    prompts = []
    for row in islice(iter_prompts(src), limit):
        if isinstance(row, Rejected):
            raise EagleError(str(row))
        prompts.append(row)
    return prompts


def iter_prompts(src: str, field: str | None = None) -> Iterator[Prompt | Rejected]:
    """The rows of a source one by one, without loading all of it: prompts, and what is none, with the reason.

    Args:
        src: `builtin:<name>`; a path, pattern or fsspec URI of prompt files; or a Hugging Face data set as
            `id`, `id:config` or `id:config:split`.
        field: the only field of a row to look at.

    Raises:
        EagleError: the source does not exist, cannot be read, or has no rows.
    """
    empty = True
    for part in _parts(src):
        name = part.rstrip("/").rsplit("/", 1)[-1].removeprefix(BUILTIN)
        for number, where, row in _rows(part):
            empty = False
            yield row if isinstance(row, Rejected) else read_row(row, src, f"{name}:{number}", where, field)
    if empty:
        raise EagleError(f"{src} has no rows: give a source with at least one prompt")


def _parts(src: str) -> list[str]:
    return [src] if src.startswith(BUILTIN) else expand(src)


def _rows(src: str) -> Iterator[Row]:
    if src.startswith(BUILTIN):
        from stages.prompts.builtin import load_builtin

        rows = enumerate(load_builtin(src.removeprefix(BUILTIN)), start=1)
        return ((number, f"{src}, row {number}", row) for number, row in rows)
    if is_prompt_file(src):
        return file_rows(src)
    path = local_path(src)
    if path is not None and path.exists():
        raise EagleError(
            f"{src} is no prompt file eagle can read: use {', '.join(FILE_TYPES)}, also with "
            f"{', '.join(COMPRESSIONS)} behind"
        )
    if (named := hub_id(src)) is not None:
        return hub_rows(src, *named)
    raise EagleError(
        f"prompts {src} not found: give a file ({', '.join(FILE_TYPES)}), a Hugging Face data set id or "
        "builtin:chat"
    )
