"""Rows of features: their text, how large their states are, and whether the target agrees with its labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from stages.artifacts import Artifact
from stages.errors import EagleError
from stages.inspect.place import Place
from stages.inspect.selection import Selection
from stages.inspect.text import Segment, segments
from stages.targets.tokenizer import TOKENIZER_FILE, load_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from stages.features.layout import FeatureRow as StoredRow


class Norms(BaseModel):
    """Euclidean norms of a row's states at one place of the target, one a token.

    Attributes:
        name: such as "layer 15", or "last" for the state after the final norm.
        states: how many there are.
        not_finite: how many hold a NaN or infinity; they are left out of the numbers.
    """

    name: str
    states: int
    mean: float | None
    least: float | None
    greatest: float | None
    not_finite: int


class FeatureRow(BaseModel):
    """One row of features.

    Attributes:
        row: its number in the artifact, from 0.
        id: the number of its conversation.
        supervised_positions: positions whose last state is stored.
        argmax_is_label: share of those at which the target's most likely token is the one that follows, None
            without any. Close to 1 where the answers were sampled greedily by this target.
    """

    row: int
    id: int
    tokens: int
    supervised_tokens: int
    supervised_positions: int
    argmax_is_label: float | None
    norms: list[Norms]
    input_ids: list[int]
    loss_mask: list[int]
    text: list[Segment] | None


def feature_rows(place: Place, selection: Selection) -> tuple[list[FeatureRow], str]:
    """The rows, and whose tokenizer gave their text or why there is none.

    Raises:
        EagleError: there are no such rows, or a shard cannot be read.
    """
    from stages.features.layout import TARGET_FOLDER
    from stages.features.ranges import ShardRanges

    artifact = place.artifact
    layers = place.manifest.config.get("feature_layers")
    tokenizer, note = _tokenizer(artifact, TARGET_FOLDER)
    found = []
    for first, shard, rows in selection.shards(place.shards):
        ranges = ShardRanges(artifact, shard)
        if selection.id is not None:
            row = next((i for i, own in enumerate(ranges.row_ids.tolist()) if str(own) == selection.id), None)
            rows = range(0) if row is None else range(row, row + 1)
        if rows:
            stored = ranges.rows(rows.start, rows.stop).rows()
            found += [
                _row(first + row, each, layers, tokenizer) for row, each in zip(rows, stored, strict=True)
            ]
    if not found:
        raise selection.nothing(place.uri, sum(shard.rows for shard in place.shards))
    return found, note


def _tokenizer(artifact: Artifact, folder: str) -> tuple[Any, str]:
    try:
        # Beside the tokenizer lie the target's embeddings, which need not be fetched for it.
        if any(file.path == f"{folder}/{TOKENIZER_FILE}" for file in artifact.manifest.files):
            tokenizer = read_tokenizer(artifact.local(f"{folder}/{TOKENIZER_FILE}"), artifact.uri)
        else:
            tokenizer = load_tokenizer(str(artifact.local(folder)))
        return tokenizer, "text by the tokenizer stored with the features"
    except EagleError as error:
        return None, f"no text of the token ids: {error}"


def _row(number: int, stored: StoredRow, layers: Any, tokenizer: Any) -> FeatureRow:
    ids, mask = stored.input_ids.tolist(), stored.loss_mask.tolist()
    hidden = stored.last.shape[-1]
    taps = stored.aux.view(len(ids), -1, hidden).unbind(1)
    names = [f"layer {layer}" for layer in layers] if isinstance(layers, list) else []
    if len(names) != len(taps):
        names = [f"tap {i + 1}" for i in range(len(taps))]
    places = zip([*names, "last"], [*taps, stored.last], strict=True)
    labels = stored.input_ids[stored.supervised + 1]
    return FeatureRow(
        row=number,
        id=stored.row_id,
        tokens=len(ids),
        supervised_tokens=sum(mask),
        supervised_positions=len(labels),
        argmax_is_label=(stored.target_argmax == labels).float().mean().item() if len(labels) else None,
        norms=[_norms(name, states) for name, states in places],
        input_ids=ids,
        loss_mask=mask,
        text=None if tokenizer is None else segments(tokenizer, ids, mask),
    )


def _norms(name: str, states: Tensor) -> Norms:
    """Of states [n, h]."""
    norms = states.float().norm(dim=-1)
    finite = norms[norms.isfinite()]
    measured = (finite.mean(), finite.min(), finite.max()) if len(finite) else (None, None, None)
    mean, least, greatest = (None if each is None else each.item() for each in measured)
    return Norms(
        name=name,
        states=len(norms),
        mean=mean,
        least=least,
        greatest=greatest,
        not_finite=len(norms) - len(finite),
    )
