"""Features: what a head trains on, one conversation a row, rows packed without padding.

A shard `features-00000.safetensors` holds R rows of T tokens in all, S of them supervised (h: the target's
hidden size):

    input_ids      [T]     int32   the row's tokens, up to the last label
    loss_mask      [T]     uint8   1 where the target sampled the token
    row_offsets    [R+1]   int64   row r is tokens row_offsets[r] .. row_offsets[r+1]
    row_ids        [R]     int64   index of the row in the conversations artifact
    aux            [T,3h]  float   residual stream entering the three feature layers: low, mid, high
    last           [S,h]   float   state after the final norm, at supervised positions only
    target_argmax  [S]     int32   the target's most likely next token there, over its whole vocabulary

A position p of a row is supervised when x_p and x_{p+1} are both response tokens and p > 0: `last` at p gives
the target's distribution of the label x_{p+1}; a head draws on (aux_{p-1}, x_p) to predict it.

Size: 5 + 3*h*b bytes a token and 4 + h*b a supervised token, b bytes a number (`shard_bytes`).

`target/` beside the shards has config and tokenizer in Hugging Face layout, and `weights.safetensors`:
`embed_tokens.weight [V,h]`, `lm_head.weight [V,h]` (absent when tied to the embeddings), `norm.weight [h]`,
and a `.bias` of the last two where the target has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from stages.errors import EagleError

if TYPE_CHECKING:
    from stages.artifacts.store import Artifact

TARGET_FOLDER = "target"
WEIGHTS_FILE = f"{TARGET_FOLDER}/weights.safetensors"

_DTYPES = {
    "input_ids": (torch.int32,),
    "loss_mask": (torch.uint8,),
    "row_offsets": (torch.int64,),
    "row_ids": (torch.int64,),
    "aux": (torch.bfloat16, torch.float16, torch.float32),
    "last": (torch.bfloat16, torch.float16, torch.float32),
    "target_argmax": (torch.int32,),
}


def shard_name(index: int) -> str:
    return f"features-{index:05d}.safetensors"


def shard_bytes(rows: int, tokens: int, supervised: int, hidden_size: int, bytes_per_number: int) -> int:
    """Bytes that these rows take in shards, without the headers (about 600 bytes a shard)."""
    per_token = 4 + 1 + 3 * hidden_size * bytes_per_number
    per_supervised = hidden_size * bytes_per_number + 4
    return tokens * per_token + supervised * per_supervised + rows * 16


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
    """One conversation: views into its shard."""

    row_id: int
    input_ids: Tensor  # [n] int32
    loss_mask: Tensor  # [n] uint8
    aux: Tensor  # [n, 3h]
    last: Tensor  # [s, h]
    target_argmax: Tensor  # [s] int32

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
            yield FeatureRow(
                row_id=row_id,
                input_ids=self.input_ids[tokens],
                loss_mask=self.loss_mask[tokens],
                aux=self.aux[tokens],
                last=self.last[supervised],
                target_argmax=self.target_argmax[supervised],
            )

    def to_bytes(self) -> bytes:
        return safetensors.torch.save({name: tensor.contiguous() for name, tensor in vars(self).items()})

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
        expected = {field.name for field in fields(cls)}
        if tensors.keys() != expected:
            odd = ", ".join(sorted(tensors.keys() ^ expected))
            raise _not_a_shard(name, f"missing or unknown tensors: {odd}")
        try:
            return cls(**tensors)
        except ValueError as error:
            raise _not_a_shard(name, str(error)) from error

    def _problem(self) -> str | None:
        for name, dtypes in _DTYPES.items():
            if getattr(self, name).dtype not in dtypes:
                return f"{name} is {getattr(self, name).dtype}"
        tokens = self.input_ids.shape[0]
        offsets = self.row_offsets
        if offsets.dim() != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != tokens:
            return f"row_offsets do not run from 0 to {tokens}"
        if (offsets[1:] <= offsets[:-1]).any():
            return "row_offsets do not ascend"
        if self.row_ids.shape != (len(offsets) - 1,):
            return f"{len(offsets) - 1} rows but row_ids of shape {tuple(self.row_ids.shape)}"
        supervised = len(supervised_positions(self.loss_mask, offsets))
        hidden = self.last.shape[-1]
        shapes = {
            "input_ids": (tokens,),
            "loss_mask": (tokens,),
            "aux": (tokens, 3 * hidden),
            "last": (supervised, hidden),
            "target_argmax": (supervised,),
        }
        for name, shape in shapes.items():
            found = tuple(getattr(self, name).shape)
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
    weights = safetensors.torch.load_file(artifact.local(WEIGHTS_FILE))
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    return weights
