"""One forward pass of the target over a batch of conversations, keeping only the states that a head needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from stages.artifacts.conversations import Conversation
from stages.features.layout import supervised_positions
from stages.features.plan import WINDOW, Plan
from stages.targets import FeatureTaps, Target

LOGITS_BYTES = 64 * 2**20  # of logits held at a time, in fp32


@dataclass(frozen=True)
class TokenBatch:
    """R conversations one after the other, without padding."""

    row_ids: tuple[int, ...]
    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] uint8
    row_offsets: Tensor  # [R+1] int64


def token_batches(conversations: Iterator[Conversation], plan: Plan, skip: int) -> Iterator[TokenBatch]:
    """The batches of `plan` behind the first `skip`; holds one window of conversations at a time."""
    for number, window in enumerate(plan.windows):
        rows = list(islice(conversations, WINDOW))
        for indices in window[skip:]:
            kept = [(rows[i - number * WINDOW], plan.rows[i].length) for i in indices]
            yield TokenBatch(
                row_ids=indices,
                input_ids=torch.tensor([t for row, n in kept for t in row.input_ids[:n]], dtype=torch.int32),
                loss_mask=torch.tensor(
                    [bit for row, n in kept for bit in row.loss_mask[:n]], dtype=torch.uint8
                ),
                row_offsets=torch.tensor([0, *(n for _, n in kept)]).cumsum(0),
            )
        skip = max(0, skip - len(window))


@dataclass(frozen=True)
class States:
    """The target's states of a token batch, on the CPU, in the target's dtype."""

    aux: Tensor  # [T, 3h]
    last: Tensor  # [S, h]
    target_argmax: Tensor  # [S] int32


@torch.inference_mode()
def target_states(target: Target, taps: FeatureTaps, batch: TokenBatch) -> States:
    """Runs the batch, padded on the right; `taps` are on the target's decoder.

    A causal model's real tokens come before the padding and cannot see it, so there is no attention mask, and
    attention takes its fast causal path.
    """
    lengths = batch.row_offsets.diff()
    longest = int(lengths.max())
    real = (
        (torch.arange(longest) < lengths[:, None]).flatten().nonzero().squeeze(1)
    )  # [T] places in the padded batch
    padded = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    padded[real] = batch.input_ids.long()
    supervised = real[supervised_positions(batch.loss_mask, batch.row_offsets)].to(target.device)

    ids = padded.view(len(lengths), longest).to(target.device)
    output = target.decoder(
        input_ids=ids, use_cache=False
    ).last_hidden_state  # [R, longest, h], after the final norm
    aux = taps.take().flatten(0, 1)[real.to(target.device)]
    last = output.flatten(0, 1)[supervised]
    return States(aux.cpu(), last.cpu(), most_likely_tokens(target, last).cpu())


def most_likely_tokens(target: Target, last: Tensor) -> Tensor:
    """The target's greedy choices [S] int32 after the states [S, h]; makes few logits at a time."""
    chunk = max(1, LOGITS_BYTES // (4 * target.vocab_size))
    choices = [target.logits(part).argmax(dim=-1) for part in last.split(chunk)]
    return torch.cat(choices).to(torch.int32)
