"""Reading prompts: a source, wherever it is and whatever its rows look like, becomes a stream of prompts."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import islice

from stages.artifacts.uri import local_path, storage_errors
from stages.errors import EagleError
from stages.prompts.files import ACCEPTED, expand, file_rows, is_prompt_file
from stages.prompts.hub import hub_id, hub_rows
from stages.prompts.prompt import Prompt, Rejected
from stages.prompts.row import Row
from stages.prompts.shapes import read_row
from stages.prompts.web import SCHEMES

BUILTIN = "builtin:"
_NOT_IN_NAMES = {"Cc", "Cs", "Zl", "Zp"}  # control characters, what is no UTF-8, and ends of lines


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
    if not src.strip() or any(unicodedata.category(c) in _NOT_IN_NAMES for c in src):
        raise EagleError(f"prompts {ascii(src)[:200]} not found: give the name of a file or data set")
    empty = True
    for part in [src] if src.startswith(BUILTIN) else expand(src):
        for row in _rows(part):
            empty = False
            if isinstance(row.value, Rejected):
                yield row.value
            else:
                yield read_row(row.value, src, row.name, row.where, field)
    if empty:
        raise EagleError(f"{src} has no rows: give a source with at least one prompt")


def _rows(src: str) -> Iterator[Row]:
    if src.startswith(BUILTIN):
        from stages.prompts.builtin import load_builtin

        name = src.removeprefix(BUILTIN)
        rows = enumerate(load_builtin(name), start=1)
        return (Row(f"{name}:{number}", f"{src}, row {number}", row) for number, row in rows)
    path = local_path(src)
    with storage_errors(src):
        exists = path is not None and path.exists()
    if exists or is_prompt_file(src) or src.startswith(SCHEMES):
        return file_rows(src)
    if (named := hub_id(src)) is not None:
        return hub_rows(src, *named)
    raise EagleError(
        f"prompts {src} not found: give a file ({ACCEPTED}), a pattern, a Hugging Face data set id or "
        "builtin:chat"
    )
