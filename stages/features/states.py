"""One forward pass of the target over a batch of conversations, keeping only the states that a head needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import TAPS, supervised_positions
from stages.features.plan import WINDOW, Plan
from stages.features.storage import StorageFormat, finite
from stages.features.token_rows import TokenRow, TokenRows
from stages.targets import FeatureTaps, Target

LOGITS_BYTES = 32 * 2**20
"""Of logits held at a time on a CPU, whose cache they should not outgrow by far."""

GPU_LOGITS_BYTES = 512 * 2**20
"""The same on a GPU, which reads all of the output layer for each part."""

_BLOCK = 128


@dataclass(frozen=True)
class TokenBatch:
    """R conversations one after the other, without padding."""

    row_ids: tuple[int, ...]
    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    row_offsets: Tensor  # [R+1] int64


def token_batches(conversations: TokenRows, plan: Plan, batches: range) -> Iterator[TokenBatch]:
    """Batches of `plan` by number; holds one window of conversations at a time."""
    start, window = -1, list[TokenRow]()
    for batch in batches:
        indices = plan.batches[batch]
        if start != indices[0] // WINDOW * WINDOW:
            start = indices[0] // WINDOW * WINDOW
            end = min(start + WINDOW, len(plan.rows))
            window = list(conversations.read(plan.first + start, plan.first + end))
        kept = [(window[index - start], plan.rows[index].length) for index in indices]
        yield TokenBatch(
            row_ids=tuple(plan.first + index for index in indices),
            input_ids=torch.cat([torch.tensor(row.input_ids[:n]) for row, n in kept]),
            loss_mask=torch.cat([torch.tensor(row.loss_mask[:n]) for row, n in kept]),
            row_offsets=torch.tensor([0, *(n for _, n in kept)]).cumsum(0),
        )


@dataclass(frozen=True)
class States:
    """The target's states of a token batch in their storage format, on the CPU once `wait` returns."""

    aux: Tensor  # [T, 3h]
    last: Tensor  # [S, h]
    target_argmax: Tensor  # [S] int32
    aux_scale: Tensor | None  # [T, 3] fp32, with fp8 only
    last_scale: Tensor | None  # [S] fp32
    finite: Tensor  # bool, of all of them
    context: Tensor | None = None  # [T-S, h], last states of the other tokens, where they are kept
    context_scale: Tensor | None = None  # [T-S] fp32
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until the device has run the forward pass and the copies are here.

        Raises:
            EagleError: a state is infinite or not a number.
        """
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            kind = StorageFormat(self.aux.dtype).name
            raise EagleError(
                f"the target has states that are infinite or no numbers, stored as {kind}: use --dtype "
                "bfloat16 or float32, and --storage-dtype auto"
            )


@torch.inference_mode()
def target_states(
    target: Target,
    taps: FeatureTaps,
    batch: TokenBatch,
    storage: StorageFormat | None = None,
    every_last: bool = False,
) -> States:
    """Runs the batch, padded on the right; `taps` are on the target's decoder.

    A causal model's real tokens come before the padding and cannot see it, so there is no attention mask, and
    attention takes its fast causal path.

    Args:
        storage: the format of the states; the target's own by default.
        every_last: keep the last states of all tokens, not of the supervised ones only.
    """
    storage = storage or StorageFormat(target.dtype)
    lengths = batch.row_offsets.diff()
    longest = int(lengths.max())
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    real = (torch.arange(longest) < lengths[:, None]).flatten().nonzero().squeeze(1)  # [T] places among all
    ids.view(-1)[real] = batch.input_ids.long()
    supervised, others = kept_last(batch, every_last)
    # To the GPU before the pass is launched: a copy behind it would wait for it.
    ids, real, supervised, others = (
        tensor.to(target.device) for tensor in (ids, real, real[supervised], real[others])
    )

    output = target.decoder(input_ids=ids, use_cache=False)
    last = output.last_hidden_state.flatten(0, 1)  # [R * longest, h], after the final norm
    context = last[others.to(last.device)] if every_last else None  # [T-S, h]
    last = last[supervised.to(last.device)]  # [S, h]
    aux = taps.take(real, last.device)  # [T, 3h]
    return pack_states(aux, last, most_likely_tokens(target, last), storage, context)


def kept_last(batch: TokenBatch, every_last: bool) -> tuple[Tensor, Tensor]:
    """Positions among the T tokens whose last states are kept, int64: supervised ones [S], and others."""
    supervised = supervised_positions(batch.loss_mask, batch.row_offsets)
    if not every_last:
        return supervised, supervised.new_empty(0)
    other = torch.ones(len(batch.input_ids), dtype=torch.bool)
    other[supervised] = False
    return supervised, other.nonzero().squeeze(1)


@torch.inference_mode()
def pack_states(
    aux: Tensor,
    last: Tensor,
    target_argmax: Tensor,
    storage: StorageFormat,
    context: Tensor | None = None,
) -> States:
    """States in their storage format, on the way to the CPU.

    Args:
        aux: [T, 3h], all on one device.
        last: [S, h].
        target_argmax: [S] int32.
        context: [T-S, h], the last states of the other tokens, where they are kept.
    """
    aux, aux_scale = storage.pack(aux, TAPS)
    last, last_scale = _pack_last(last, storage)
    fine = finite(aux, aux_scale) & finite(last, last_scale)
    context_scale = None
    if context is not None:
        context, context_scale = _pack_last(context, storage)
        fine &= finite(context, context_scale)
    states = States(aux, last, target_argmax, aux_scale, last_scale, fine, context, context_scale)
    return _on_the_cpu(states)


def _pack_last(last: Tensor, storage: StorageFormat) -> tuple[Tensor, Tensor | None]:
    """Last states [n, h] and their scales [n], if the format has such."""
    packed, scale = storage.pack(last, 1)
    return packed, None if scale is None else scale.squeeze(1)


def most_likely_tokens(target: Target, last: Tensor) -> Tensor:
    """The target's greedy choices [S] int32 after the states [S, h]; makes few logits at a time."""
    most = LOGITS_BYTES if last.device.type == "cpu" else GPU_LOGITS_BYTES
    chunk = max(1, most // (target.dtype.itemsize * target.vocab_size))
    choices = [first_of_largest(target.logits(part)) for part in last.split(chunk)]
    return torch.cat(choices).to(torch.int32) if choices else last.new_zeros(0, dtype=torch.int32)


def first_of_largest(logits: Tensor) -> Tensor:
    """argmax over the last dimension of [n, V], the first of equals: int64 [n].

    On a CPU `argmax` in 16 bits costs half as much as the logits themselves, `amax` a thirtieth: so it finds
    the block of the largest first, and then looks in that block only.
    """
    if logits.device.type != "cpu" or logits.shape[1] < 4 * _BLOCK:
        return logits.argmax(-1)
    whole = logits.shape[1] // _BLOCK * _BLOCK
    blocks = logits[:, :whole].unflatten(1, (-1, _BLOCK))  # [n, V / 128, 128]
    largest = blocks.amax(-1)  # [n, V / 128]
    block = largest.argmax(-1, keepdim=True)  # [n, 1]
    inside = blocks.take_along_dim(block[..., None], dim=1).squeeze(1).argmax(-1)
    first = block.squeeze(1) * _BLOCK + inside
    if whole == logits.shape[1]:
        return first
    rest = logits[:, whole:]
    beyond = rest.amax(-1) > largest.take_along_dim(block, 1).squeeze(1)
    return torch.where(beyond, whole + rest.argmax(-1), first)


def _on_the_cpu(states: States) -> States:
    """Starts the copies from a GPU and does not wait for them, so that the next pass can be launched."""
    device = states.last.device
    copied = torch.cuda.Event() if device.type == "cuda" else None

    def copy(value: Tensor) -> Tensor:
        if copied is None:
            return value.cpu()
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return pinned.copy_(value, non_blocking=True)

    def copy_any(value: Tensor | None) -> Tensor | None:
        return None if value is None else copy(value)

    copies = States(
        copy(states.aux),
        copy(states.last),
        copy(states.target_argmax),
        copy_any(states.aux_scale),
        copy_any(states.last_scale),
        copy(states.finite),
        copy_any(states.context),
        copy_any(states.context_scale),
        copied,
    )
    if copied is not None:
        copied.record(torch.cuda.current_stream(device))
    return copies
