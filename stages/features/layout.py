"""Features: what a head trains on, one conversation a row, rows packed without padding.

A shard `features-00000-<digest>.safetensors` holds R rows of T tokens in all, S of them supervised (h: the
target's hidden size):

    input_ids      [T]     int32   the row's tokens, up to the last label
    loss_mask      [T]     uint8   1 where the target sampled the token
    row_offsets    [R+1]   int64   row r is tokens row_offsets[r] .. row_offsets[r+1]
    row_ids        [R]     int64   index of the row in the conversations artifact
    aux            [T,3h]  float   residual stream entering the three feature layers: low, mid, high
    last           [S,h]   float   state after the final norm, at supervised positions only
    target_argmax  [S]     int32   the target's most likely next token there, over its whole vocabulary
    aux_scale      [T,3]   fp32    with fp8 only: factor of each of the three states of a token
    last_scale     [S]     fp32    with fp8 only: factor of each last state
    context        [T-S,h] float   with --last all: state after the final norm, at all other positions
    context_scale  [T-S]   fp32    with both: factor of each of those

A position p of a row is supervised when x_p and x_{p+1} are both response tokens and p > 0: `last` at p gives
the target's distribution of the label x_{p+1}; a head draws on (aux_{p-1}, x_p) to predict it.

Size: 5 + 3hb bytes a token and 4 + hb a supervised token, b bytes a number, with fp8 12 and 4 more
(`ShardSizes`). Where all last states are kept, which EAGLE-1 and Medusa learn from, hb for each other token.

`target/` beside the shards has config and tokenizer in Hugging Face layout, and `weights.safetensors`:
`embed_tokens.weight [V,h]`, `lm_head.weight [V,h]` (absent when tied to the embeddings), `norm.weight [h]`,
and a `.bias` of the last two where the target has one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from stages.errors import EagleError
from stages.features.storage import FP8, StorageFormat, unpack

if TYPE_CHECKING:
    from stages.artifacts import Artifact

TARGET_FOLDER = "target"
WEIGHTS_FILE = f"{TARGET_FOLDER}/weights.safetensors"
TAPS = 3

_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
_DTYPES = {
    "input_ids": (torch.int32,),
    "loss_mask": (torch.uint8,),
    "row_offsets": (torch.int64,),
    "row_ids": (torch.int64,),
    "aux": _STATE_DTYPES,
    "last": _STATE_DTYPES,
    "target_argmax": (torch.int32,),
    "aux_scale": (torch.float32,),
    "last_scale": (torch.float32,),
    "context": _STATE_DTYPES,
    "context_scale": (torch.float32,),
}
_SCALED = {"aux_scale": "aux", "last_scale": "last", "context_scale": "context"}
_OPTIONAL = {*_SCALED, "context"}
_SAFETENSORS_NAMES = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    FP8: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


def shard_name(index: int) -> str:
    return f"features-{index:05d}.safetensors"


@dataclass(frozen=True)
class ShardSizes:
    """How much a shard holds, and so how many bytes its file has."""

    rows: int
    tokens: int
    supervised: int
    hidden_size: int
    storage: StorageFormat
    every_last: bool = False  # the last states of all tokens are there, not of the supervised ones only

    def empty(self, device: str = "cpu") -> dict[str, Tensor]:
        """The tensors of such a shard by name, not filled."""
        states, scaled, h = self.storage.dtype, self.storage.scaled, self.hidden_size
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((self.tokens,), torch.int32),
            "loss_mask": ((self.tokens,), torch.uint8),
            "row_offsets": ((self.rows + 1,), torch.int64),
            "row_ids": ((self.rows,), torch.int64),
            "aux": ((self.tokens, TAPS * h), states),
            "last": ((self.supervised, h), states),
            "target_argmax": ((self.supervised,), torch.int32),
        }
        context = self.tokens - self.supervised
        if self.every_last:
            shapes["context"] = ((context, h), states)
        if scaled:
            shapes["aux_scale"] = ((self.tokens, TAPS), torch.float32)
            shapes["last_scale"] = ((self.supervised,), torch.float32)
            if self.every_last:
                shapes["context_scale"] = ((context,), torch.float32)
        return {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }

    @property
    def bytes(self) -> int:
        """Of the file, header included."""
        tensors = self.empty(device="meta")
        return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def _in_file_order(tensors: dict[str, Tensor]) -> list[str]:
    """Wide numbers first, so that each tensor of a mapped file begins where its numbers may."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: dict[str, Tensor]) -> bytes:
    """What precedes the data in a safetensors file: its own length, then names, shapes and places as JSON."""
    entries, end = {}, 0
    for name in _in_file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        kind, shape = _SAFETENSORS_NAMES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def supervised_positions(loss_mask: Tensor, row_offsets: Tensor) -> Tensor:
    """Positions whose token and next token are both the target's own, as flat indices in order.

    loss_mask [T] of 0 and 1; row_offsets [R+1] ascending from 0 to T. Returns [S] int64. A row's first token
    is never supervised (no feature precedes it), nor is its last (no label follows it), nor is the token
    before a response: the target itself chooses the first response token, so a head never has to.
    """
    sampled = loss_mask.bool()
    supervised = torch.zeros_like(sampled)
    supervised[:-1] = sampled[:-1] & sampled[1:]
    starts, ends = row_offsets[:-1], row_offsets[1:]
    filled = ends > starts
    supervised[starts[filled]] = False
    supervised[ends[filled] - 1] = False
    return supervised.nonzero().squeeze(1)


@dataclass(frozen=True)
class FeatureRow:
    """One conversation: views into its shard. `aux`, `last`, `every_last` are states to calculate with."""

    row_id: int
    input_ids: Tensor  # [n] int32
    loss_mask: Tensor  # [n] uint8
    stored_aux: Tensor  # [n, 3h]
    stored_last: Tensor  # [s, h]
    target_argmax: Tensor  # [s] int32
    aux_scale: Tensor | None = None  # [n, 3]
    last_scale: Tensor | None = None  # [s]
    stored_context: Tensor | None = None  # [n-s, h]
    context_scale: Tensor | None = None  # [n-s]

    @property
    def aux(self) -> Tensor:
        """[n, 3h] as stored; bfloat16 from fp8."""
        return unpack(self.stored_aux, self.aux_scale)

    @property
    def last(self) -> Tensor:
        """[s, h] as stored; bfloat16 from fp8."""
        return unpack(self.stored_last, self.last_scale)

    @property
    def every_last(self) -> Tensor | None:
        """[n, h], the state after the final norm at every token; None where it is not stored."""
        if self.stored_context is None:
            return None
        supervised = torch.zeros(len(self.input_ids), dtype=torch.bool)
        supervised[self.supervised] = True
        last, context = self.last, unpack(self.stored_context, self.context_scale)
        states = last.new_empty(len(supervised), last.shape[1])
        states[supervised], states[~supervised] = last, context
        return states

    @property
    def supervised(self) -> Tensor:
        """[s] int64: the positions in the row that `last` and `target_argmax` belong to."""
        return supervised_positions(self.loss_mask, torch.tensor([0, len(self.loss_mask)]))


@dataclass(frozen=True)
class FeatureShard:
    """The tensors of one shard, on the CPU; the module's docstring says what each is."""

    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    row_offsets: Tensor  # [R+1] int64
    row_ids: Tensor  # [R] int64
    aux: Tensor  # [T, 3h]
    last: Tensor  # [S, h]
    target_argmax: Tensor  # [S] int32
    aux_scale: Tensor | None = None  # [T, 3]
    last_scale: Tensor | None = None  # [S]
    context: Tensor | None = None  # [T-S, h]
    context_scale: Tensor | None = None  # [T-S]

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"inconsistent feature shard: {problem}")

    @property
    def hidden_size(self) -> int:
        return self.last.shape[1]

    def rows(self) -> Iterator[FeatureRow]:
        positions = supervised_positions(self.loss_mask, self.row_offsets)
        offsets = self.row_offsets.tolist()
        bounds = torch.searchsorted(positions, self.row_offsets).tolist()
        for r, row_id in enumerate(self.row_ids.tolist()):
            tokens = slice(offsets[r], offsets[r + 1])
            supervised = slice(bounds[r], bounds[r + 1])
            context = slice(tokens.start - supervised.start, tokens.stop - supervised.stop)
            yield FeatureRow(
                row_id=row_id,
                input_ids=self.input_ids[tokens],
                loss_mask=self.loss_mask[tokens],
                stored_aux=self.aux[tokens],
                stored_last=self.last[supervised],
                target_argmax=self.target_argmax[supervised],
                aux_scale=None if self.aux_scale is None else self.aux_scale[tokens],
                last_scale=None if self.last_scale is None else self.last_scale[supervised],
                stored_context=None if self.context is None else self.context[context],
                context_scale=None if self.context_scale is None else self.context_scale[context],
            )

    def to_bytes(self) -> bytes:
        """The shard as a safetensors file, copied once; the same content gives the same bytes."""
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        data = [tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in _in_file_order(tensors)]
        return b"".join([_header(tensors), *data])

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "shard") -> FeatureShard:
        """Raises EagleError when `data` is not a feature shard; `name` is what the message calls it."""
        try:
            return cls._from_tensors(safetensors.torch.load(data), name)
        except SafetensorError as error:
            raise _not_a_shard(name, str(error)) from error

    @classmethod
    def from_file(cls, path: Path) -> FeatureShard:
        """Maps the file: tensors are read as they are touched. Raises EagleError like `from_bytes`."""
        try:
            return cls._from_tensors(safetensors.torch.load_file(path), str(path))
        except SafetensorError as error:
            raise _not_a_shard(str(path), str(error)) from error

    @classmethod
    def _from_tensors(cls, tensors: dict[str, Tensor], name: str) -> FeatureShard:
        odd = tensors.keys() ^ _DTYPES.keys()
        if not odd <= _OPTIONAL:
            raise _not_a_shard(name, f"missing or unknown tensors: {', '.join(sorted(odd - _OPTIONAL))}")
        try:
            return cls(**tensors)
        except ValueError as error:
            raise _not_a_shard(name, str(error)) from error

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def _problem(self) -> str | None:
        for name, tensor in self._tensors().items():
            if tensor.dtype not in _DTYPES[name]:
                return f"{name} is {tensor.dtype}"
        for name in ("last", "context"):
            states = getattr(self, name)
            if states is not None and states.dtype != self.aux.dtype:
                return f"aux is {self.aux.dtype} and {name} {states.dtype}"
        for scale, name in _SCALED.items():
            scaled = getattr(self, name) is not None and self.aux.dtype == FP8
            if (getattr(self, scale) is not None) != scaled:
                return f"{scale} and states of {self.aux.dtype} do not go together"
        tokens = self.input_ids.shape[0]
        offsets = self.row_offsets
        if offsets.dim() != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != tokens:
            return f"row_offsets do not run from 0 to {tokens}"
        if (offsets[1:] <= offsets[:-1]).any():
            return "row_offsets do not ascend"
        if self.row_ids.shape != (len(offsets) - 1,):
            return f"{len(offsets) - 1} rows but row_ids of shape {tuple(self.row_ids.shape)}"
        supervised = len(supervised_positions(self.loss_mask, offsets))
        storage = StorageFormat(self.aux.dtype)
        every_last = self.context is not None
        sizes = ShardSizes(len(self.row_ids), tokens, supervised, self.last.shape[-1], storage, every_last)
        for name, expected in sizes.empty(device="meta").items():
            shape, found = tuple(expected.shape), tuple(getattr(self, name).shape)
            if found != shape:
                return f"{name} has shape {found}, not {shape}"
        return None


def _not_a_shard(name: str, reason: str) -> EagleError:
    return EagleError(f"{name} is not a feature shard ({reason}): run eagle extract-features again")


def read_feature_shards(artifact: Artifact) -> Iterator[FeatureShard]:
    """The artifact's shards in order, one in memory at a time."""
    for shard in artifact.manifest.shards:
        yield FeatureShard.from_file(artifact.local(shard.path))


def read_target_weights(artifact: Artifact) -> dict[str, Tensor]:
    """`embed_tokens.weight`, `lm_head.weight` (the embeddings when tied), `norm.weight`, any biases."""
    with artifact.pinned(WEIGHTS_FILE) as path:
        weights = safetensors.torch.load_file(path)  # mapped, so they outlast a copy that leaves the cache
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    return weights
