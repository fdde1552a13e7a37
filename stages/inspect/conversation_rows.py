"""Rows of conversations, as the text of their token ids where the target's tokenizer can be had."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from stages.errors import EagleError
from stages.inspect.place import Place
from stages.inspect.selection import Selection
from stages.inspect.text import Segment, segments
from stages.targets.tokenizer import load_tokenizer, tokenizer_digest

if TYPE_CHECKING:
    from stages.artifacts.conversations import Conversation


class ConversationRow(BaseModel):
    """One conversation.

    Attributes:
        row: its number in the artifact, from 0.
        text: its token ids as text, None where no tokenizer could be had.
    """

    row: int
    id: str
    source: str
    license: str
    category: str
    finish_reason: str
    tokens: int
    supervised_tokens: int
    messages: list[dict[str, Any]]
    input_ids: list[int]
    loss_mask: list[int]
    text: list[Segment] | None


def conversation_rows(
    place: Place, selection: Selection, target: str | None
) -> tuple[list[ConversationRow], str]:
    """The rows, and whose tokenizer gave their text or why there is none.

    Raises:
        EagleError: there are no such rows, a shard cannot be read, or `target` has no tokenizer or another
            one than that which made the ids.
    """
    chosen = _chosen(place, selection)
    if not chosen:
        raise selection.nothing(place.uri, sum(shard.rows for shard in place.shards))
    tokenizer, note = _tokenizer(place, target)
    return [_row(number, conversation, tokenizer) for number, conversation in chosen], note


def _chosen(place: Place, selection: Selection) -> list[tuple[int, Conversation]]:
    from stages.artifacts.conversations import read_conversations

    artifact = place.artifact
    chosen: list[tuple[int, Conversation]] = []
    for first, shard, within in selection.shards(place.shards):
        rows: Sequence[int] = within
        if selection.id is not None:
            rows = _with_id(artifact.read(shard.path), selection.id, f"{place.uri}/{shard.path}")
        if rows:
            conversations = list(read_conversations(artifact, [shard]))
            chosen += [(first + row, conversations[row]) for row in rows]
    return chosen


def _with_id(data: bytes, wanted: str, where: str) -> list[int]:
    """The numbers of the rows of a shard that have an id; reads the column of ids only."""
    import pyarrow
    from pyarrow import parquet

    try:
        ids = parquet.read_table(io.BytesIO(data), columns=["id"]).column("id").to_pylist()
    except (pyarrow.ArrowException, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EagleError(f"{where} cannot be read ({reason}): rerun eagle gen-data") from None
    return [row for row, own in enumerate(ids) if own == wanted]


def _row(number: int, conversation: Conversation, tokenizer: Any) -> ConversationRow:
    ids, mask = conversation.input_ids, conversation.loss_mask
    return ConversationRow(
        row=number,
        **vars(conversation),
        tokens=len(ids),
        supervised_tokens=sum(mask),
        text=None if tokenizer is None else segments(tokenizer, ids, mask),
    )


def _tokenizer(place: Place, target: str | None) -> tuple[Any, str]:
    made_for = place.manifest.target
    name = target or (made_for.name if made_for else None)
    if name is None:
        return None, "the artifact names no target: --target gives one whose tokenizer decodes the ids"
    try:
        tokenizer = load_tokenizer(name, made_for.tokenizer if made_for else None)
        if made_for is not None and tokenizer_digest(tokenizer) != made_for.tokenizer:
            asked = "--target " if target else ""
            raise EagleError(
                f"{asked}{name} has another tokenizer than {made_for.name}, for which {place.uri} was made"
            )
    except EagleError as error:
        if target is not None:
            raise
        return None, f"no text of the token ids, only the messages: {error}; --target can name another place"
    return tokenizer, f"text by the tokenizer of {name}"
