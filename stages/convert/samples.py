"""One file of another tool's hidden states, as the row that our own extraction would have made of it.

All have states of every token, and masks that are 1 at every token of an answer.

speculators, `hs_<n>.safetensors`: `hidden_states` [T, 4, h], the inputs of layers 2, L//2 and L-3 and the
last state from *before* the final norm; `token_ids` [T]; masks in a dataset beside.

speculators up to 0.4, `data_<n>.pt`: `hidden_states`, a list of four [T, h], the *outputs* of layers 2, L//2
and L-3 and the last state before the norm; `input_ids`, `loss_mask` [T].

SpecForge, `data_<n>.ckpt` or `.ckpt.gz`: `aux_hidden_state` [1, T, 3h], the inputs of layers 2, L//2 and L-3;
`hidden_state` [1, T, h], the last *after* the norm; `input_ids`, `loss_mask` [T].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from stages.artifacts import join
from stages.config import several
from stages.convert.formats import Kind, SampleFile
from stages.convert.masks import LossMasks
from stages.convert.pickles import DamagedError, load_pickle
from stages.convert.source import Source
from stages.errors import EagleError
from stages.targets.taps import eagle3_feature_layers

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = "data_config.json"  # of speculators up to 0.4, beside data_*.pt


class RejectedError(Exception):
    """A sample that cannot be used; the message says why in a few words that other samples may share."""


@dataclass(frozen=True)
class Sample:
    """All tokens of one row, before anything is cut."""

    number: int
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] 1 at tokens of an answer
    aux: Tensor  # [T, 3h]
    last: Tensor  # [T, h]


def read_samples(
    source: Source, kind: Kind, files: list[SampleFile], masks: LossMasks | None
) -> Iterator[tuple[SampleFile, Sample | RejectedError]]:
    """The samples in order, one in memory at a time and a few being read.

    Raises:
        EagleError: the storage fails, a pickle holds more than tensors, or the files have another layout.
    """
    for file, data in zip(files, source.read_in_order([file.name for file in files]), strict=True):
        where = join(source.uri, file.name)
        try:
            yield file, _sample(kind, file, data, where, masks)
        except DamagedError:
            yield file, RejectedError("damaged")
        except RejectedError as reason:
            yield file, reason


def default_layers(source: Source, kind: Kind, depth: int) -> tuple[int, int, int]:
    """The layers whose inputs the files have when nobody chose others, for a target of `depth` layers.

    Raises:
        EagleError: the files' settings say that they are others than three and the last.
    """
    if kind != "speculators-pickles":
        return eagle3_feature_layers(depth)
    ids = [2, depth // 2, depth - 3, depth - 1]
    if SETTINGS in source.sizes:
        try:
            ids = [int(each) for each in json.loads(source.read(SETTINGS))["hidden_states"]["layer_ids"]]
        except (ValueError, KeyError, TypeError):
            raise EagleError(
                f"{join(source.uri, SETTINGS)} does not say which layers it took: remove it and give --layers"
            ) from None
    if len(ids) != 4 or ids[3] != depth - 1:
        raise EagleError(
            f"{source.uri} has states of layers {ids}; training needs three and the last one, {depth - 1}: "
            "take them again"
        )
    low, mid, high = (each + 1 for each in ids[:3])  # the output of a layer is the input of the next
    return low, mid, high


def last_is_normed(kind: Kind) -> bool:
    """Whether the tool stores the last state after the target's final norm."""
    return kind == "specforge"


def first_dtype(source: Source, kind: Kind, files: list[SampleFile]) -> torch.dtype:
    """The number format of the states in the first file that can be read.

    Raises:
        EagleError: there is none, or it is no floating-point format that features have.
    """
    for file in files:
        where = join(source.uri, file.name)
        try:
            content = _content(kind, source.read(file.name), where)
        except DamagedError:
            continue
        states = content.get("aux_hidden_state" if kind == "specforge" else "hidden_states")
        tensor = states[0] if isinstance(states, (list, tuple)) and states else states
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            raise _other_layout(where, f"states of {getattr(tensor, 'dtype', type(tensor).__name__)}")
        return tensor.dtype
    raise EagleError(
        f"none of the {several(len(files), 'file')} in {source.uri} can be read: check how they were copied"
    )


def _content(kind: Kind, data: bytes, where: str) -> dict[str, Any]:
    """What is in a file, by name."""
    if kind != "speculators":
        content = load_pickle(data, where)
        if not isinstance(content, dict):
            raise _other_layout(where, f"a {type(content).__name__}")
        return content
    try:
        return dict(safetensors.torch.load(data))
    except SafetensorError as error:
        raise DamagedError(str(error)) from None


def _sample(kind: Kind, file: SampleFile, data: bytes, where: str, masks: LossMasks | None) -> Sample:
    content = _content(kind, data, where)
    if kind == "speculators":
        assert masks is not None
        return _speculators(file, content, where, masks)
    ids, mask = (_tensor(content, name, where, 1) for name in ("input_ids", "loss_mask"))
    if kind == "specforge":
        aux, last = (_tensor(content, name, where, 2) for name in ("aux_hidden_state", "hidden_state"))
    else:
        states = content.get("hidden_states")
        if not isinstance(states, (list, tuple)) or len(states) != 4:
            raise _other_layout(where, "no four hidden_states")
        aux, last = torch.cat(list(states[:3]), dim=-1), states[3]
    return _whole(Sample(file.number, ids, mask, aux, last), where)


def _speculators(file: SampleFile, content: dict[str, Any], where: str, masks: LossMasks) -> Sample:
    states, ids = _tensor(content, "hidden_states", where, 3), _tensor(content, "token_ids", where, 1)
    if states.dim() != 3 or states.shape[1] != 4:
        raise _other_layout(where, f"hidden_states of shape {tuple(states.shape)}, not [tokens, 4, width]")
    row = masks.row(file.number)
    if row is None:
        raise RejectedError("not in the dataset")
    if not torch.equal(row.input_ids, ids.long()):
        raise RejectedError("of other tokens than the dataset")
    return _whole(Sample(file.number, ids, row.loss_mask, states[:, :3].flatten(1), states[:, 3]), where)


def _whole(sample: Sample, where: str) -> Sample:
    """The sample, once its parts are seen to belong together."""
    width = sample.last.shape[-1]
    if sample.last.dim() != 2 or sample.aux.shape[1:] != (3 * width,) or sample.input_ids.dim() != 1:
        shapes = ", ".join(
            f"{name} {tuple(getattr(sample, name).shape)}" for name in ("input_ids", "aux", "last")
        )
        raise _other_layout(where, shapes)
    lengths = {len(part) for part in (sample.input_ids, sample.loss_mask, sample.aux, sample.last)}
    if len(lengths) > 1:
        raise RejectedError("with parts of different lengths")
    return replace(sample, input_ids=sample.input_ids.long())


def _tensor(content: dict[str, Any], name: str, where: str, dimensions: int) -> Tensor:
    """The tensor of that name, without the leading dimension of one that some versions keep."""
    found = content.get(name)
    if not isinstance(found, Tensor):
        raise _other_layout(where, f"no tensor {name}, but {', '.join(sorted(map(str, content))[:6])}")
    return found[0] if found.dim() == dimensions + 1 and found.shape[0] == 1 else found


def _other_layout(where: str, found: str) -> EagleError:
    return EagleError(f"{where} is no file of EAGLE-3 training states ({found}): check --format")
