"""Reading prompts: one row of a source becomes one `Prompt`, whatever shape the row has.

Only what users wrote is taken. Answers that a source carries were written by other models or people; they are
neither the target's words nor, often, free to train on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from stages.artifacts.uri import filesystem, local_path, storage_errors
from stages.errors import EagleError

BUILTIN = "builtin:"
FILE_TYPES = (".jsonl", ".parquet")
OTHER_FILE_TYPES = (".arrow", ".csv", ".gz", ".json", ".tsv", ".txt", ".zip", ".zst")
MESSAGE_FIELDS = ("messages", "conversations")
TEXT_FIELDS = ("prompt", "question", "instruction", "text")
USER_ROLES = ("user", "human")
SHAPES = "turns, messages, conversations, prompt, question, instruction (+ input) or text"

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Prompt:
    """What users said in one conversation, without the answers.

    Attributes:
        id: the row's own id, or `<file name>:<row number>`.
        turns: the user's turns, in order; at least one, none of them blank.
        source: what the prompt was read from, as the user wrote it.
        system: the system message that opened the conversation, "" if there was none.
    """

    id: str
    turns: tuple[str, ...]
    source: str
    category: str = ""
    license: str = ""
    system: str = ""


def read_prompts(src: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a source, all of them by default.

    Args:
        src: `builtin:<name>`, a path or fsspec URI of a `.jsonl` or `.parquet` file, or the id of a Hugging
            Face data set.

    Raises:
        EagleError: as `iter_prompts`.
    """
    return list(islice(iter_prompts(src), limit))


def iter_prompts(src: str) -> Iterator[Prompt]:
    """The prompts of a source, one by one, without loading the whole source.

    Raises:
        EagleError: the source does not exist, cannot be read, has no rows, or has a row that is no prompt.
    """
    name = src.rstrip("/").rsplit("/", 1)[-1].removeprefix(BUILTIN)
    empty = True
    for number, where, row in _rows(src):
        empty = False
        yield _prompt(row, src, f"{name}:{number}", where)
    if empty:
        raise EagleError(f"{src} has no rows: give a source with at least one prompt")


def _rows(src: str) -> Iterator[tuple[int, str, Any]]:
    """Row number from 1, the place to name in an error, and the row."""
    if src.startswith(BUILTIN):
        from stages.prompts.builtin import load_builtin

        rows = enumerate(load_builtin(src.removeprefix(BUILTIN)), start=1)
        yield from ((number, f"{src}, row {number}", row) for number, row in rows)
    elif src.lower().endswith(FILE_TYPES):
        yield from _file_rows(src)
    elif (path := local_path(src)) is None or path.exists() or src.lower().endswith(OTHER_FILE_TYPES):
        raise EagleError(f"{src} is no prompt file eagle can read: use {' or '.join(FILE_TYPES)}")
    elif _HUB_ID.fullmatch(src):
        yield from _hub_rows(src)
    else:
        raise EagleError(f"prompts {src} not found: give a file, a Hugging Face data set id or builtin:chat")


def _file_rows(src: str) -> Iterator[tuple[int, str, Any]]:
    read = _jsonl_rows if src.lower().endswith(".jsonl") else _parquet_rows
    fs, path = filesystem(src)
    with storage_errors(src):
        if not fs.isfile(path):
            raise EagleError(f"prompts {src} not found: check the path")
        with fs.open(path, "rb") as file:
            yield from read(src, file)


def _jsonl_rows(src: str, file: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
    # A binary file splits at b"\n" only. Splitting text would also break strings at U+2028 and its like.
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        where = f"{src}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise EagleError(f"{where} is not JSON ({reason}): each line must be one JSON object") from None
        yield number, where, row


def _parquet_rows(src: str, file: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, f"{src}, row {number}", row
    except pyarrow.ArrowException as error:
        raise EagleError(f"{src} cannot be read as Parquet ({' '.join(str(error).split())})") from None


def _hub_rows(src: str) -> Iterator[tuple[int, str, Any]]:
    import datasets

    try:
        splits = datasets.load_dataset(src, streaming=True)
        split = "train" if "train" in splits else next(iter(splits))
        for number, row in enumerate(splits[split], start=1):
            yield number, f"{src} [{split}], row {number}", row
    except EagleError:
        raise
    except (
        Exception
    ) as error:  # the hub client, its transports and the data set's own format each raise their own
        reason = " ".join(str(error).split())[:200]
        raise EagleError(
            f"prompts {src}: no such file, and not to be had as a Hugging Face data set either "
            f"({type(error).__name__}: {reason})"
        ) from None


def _prompt(row: Any, src: str, fallback_id: str, where: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise EagleError(f"{where} is {type(row).__name__}, not an object: give it a field {SHAPES}")
    read = _read_turns(row, where)
    if read is None:
        keys = ", ".join(map(str, row)) or "none"
        raise EagleError(f"{where} is no prompt, its keys are: {keys}; eagle reads {SHAPES}")
    system, turns = read
    turns = tuple(turn for turn in turns if turn.strip())
    if not turns:
        raise EagleError(f"{where} has no text from a user: remove the row")
    own_id = row.get("id")
    return Prompt(
        id=_encodable(str(own_id)) if isinstance(own_id, str | int) and own_id != "" else fallback_id,
        turns=turns,
        source=src,
        category=_label(row.get("category")),
        license=_label(row.get("license")),
        system=system,
    )


def _read_turns(row: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]] | None:
    """System message and user turns of a row; None if it has none of the known shapes."""
    turns = row.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return "", tuple(map(_encodable, turns))
    for field in MESSAGE_FIELDS:
        if isinstance(row.get(field), list):
            return _read_messages(row[field], f"{where}, {field}")
    for field in TEXT_FIELDS:
        if isinstance(text := row.get(field), str):
            details = row.get("input") if field == "instruction" else None
            whole = f"{text}\n\n{details}" if isinstance(details, str) and details.strip() else text
            return "", (_encodable(whole),)
    return None


def _read_messages(messages: list[Any], where: str) -> tuple[str, tuple[str, ...]]:
    system, turns = "", []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise EagleError(
                f"{where}: message {place + 1} is {type(message).__name__}, not role and content"
            )
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if role is None:
            keys = ", ".join(map(str, message)) or "none"
            raise EagleError(f"{where}: message {place + 1} has no role or from, its keys are: {keys}")
        if role in USER_ROLES or (role == "system" and place == 0):
            if content is not None and not isinstance(content, str):
                kind = type(content).__name__
                raise EagleError(
                    f"{where}: the content of message {place + 1} is {kind}; eagle reads text only"
                )
            if role == "system":
                system = _encodable(content or "")
            else:
                turns.append(_encodable(content or ""))
    return system, tuple(turns)


def _label(value: Any) -> str:
    return _encodable(value) if isinstance(value, str) else ""


def _encodable(text: str) -> str:
    """`text` with lone surrogates (half of an emoji cut in two by a JSON escape) replaced: UTF-8 has none."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
