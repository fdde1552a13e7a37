"""Another tool's hidden states -> features: cut, finish, check and pack one sample after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from stages.artifacts import ArtifactWriter
from stages.convert.formats import SampleFile
from stages.convert.samples import RejectedError, Sample
from stages.convert.tally import Tally
from stages.errors import EagleError
from stages.features.config import LongRows
from stages.features.layout import FeatureShard, ShardSizes, shard_name
from stages.features.plan import keep
from stages.features.shards import ShardBuilder
from stages.features.states import States, TokenBatch, kept_last, most_likely_tokens, pack_states
from stages.features.storage import StorageFormat
from stages.targets import Target
from stages.targets.ends import final_norm

NORMED_WITHIN = 0.02
"""How far from 1 the root mean square of a normed state may be, the norm's own weights divided out."""

TELLING = 8  # states all so near 1 are no coincidence
_LEAST_GAIN = 1e-3  # weights of the norm below this tell nothing


class Finisher:
    """Makes of a sample what our own extraction would have stored of that conversation."""

    def __init__(
        self,
        target: Target,
        storage: StorageFormat,
        *,
        normed: bool,
        max_length: int,
        long_rows: LongRows,
        source: str,
        every_last: bool = False,
    ) -> None:
        """Args:
        normed: the last states come from after the target's final norm.
        source: for messages.
        every_last: keep the last states of all tokens, not of the supervised ones only.
        """
        self._every_last = every_last
        self._target, self._storage, self._normed, self._source = target, storage, normed, source
        self._max_length, self._long_rows = max_length, long_rows
        self._norm = final_norm(target.model)
        self._gain, self._shift = _norm_weights(self._norm, target)
        self._ends = torch.tensor(sorted(target.eos_ids))

    @torch.inference_mode()
    def finish(self, sample: Sample, tally: Tally) -> tuple[TokenBatch, States] | None:
        """Counts what it does in `tally`; None for a row that is dropped as too long.

        Raises:
            RejectedError: there is nothing to learn from it, or it holds NaN or infinity.
            EagleError: it was made for another target, or its last states are not what they are said to be.
        """
        self._check_target(sample)
        answers, unmasked = without_glue(sample.loss_mask.bool(), sample.input_ids, self._ends)
        loss_mask = answers.to(torch.uint8)
        kept = keep(loss_mask.numpy(), self._max_length, self._long_rows)
        if kept.fate == "dropped":
            tally.dropped += 1
            return None
        if not kept.length:
            raise RejectedError("too short" if len(loss_mask) < 3 else "without a supervised token")
        ids, loss_mask = sample.input_ids[: kept.length].int(), loss_mask[: kept.length]
        offsets = torch.tensor([0, kept.length])
        batch = TokenBatch((sample.number,), ids, loss_mask, offsets)
        positions, others = kept_last(batch, self._every_last)
        last = self._finished(sample.last[positions])
        context = self._after_norm(sample.last[others]).cpu() if self._every_last else None
        choices = most_likely_tokens(self._target, last).cpu()
        aux = sample.aux[: kept.length].to(self._target.dtype)
        states = pack_states(aux, last.cpu(), choices, self._storage, context)
        if not states.finite:
            raise RejectedError("not finite")
        tally.rows += 1
        tally.tokens += kept.length
        tally.supervised += kept.supervised
        tally.clipped += kept.fate == "clipped"
        tally.unmasked += unmasked
        tally.agreed += int((choices == ids[positions + 1]).sum())
        return batch, states

    def _after_norm(self, last: Tensor) -> Tensor:
        """The states [n, h] after the target's final norm, on its device."""
        last = last.to(self._target.device, self._target.dtype)
        return last if self._normed else self._norm(last)

    def _finished(self, last: Tensor) -> Tensor:
        """The same of states [S, h] at supervised positions, which have to be what they are said to be."""
        target = self._target
        last = last.to(target.device, target.dtype)
        sizes = self._root_mean_squares(last)
        near_one = (sizes - 1).abs() < NORMED_WITHIN
        if self._normed and near_one.float().mean() < 0.5:
            raise EagleError(
                f"the last states in {self._source} are not what the final norm of {target.name} gives "
                f"(their root mean square without its weights is {sizes.median():.3g}, not 1): give the "
                "--target they were taken from, or --last-state before-norm"
            )
        if not self._normed and len(last) >= TELLING and near_one.all():
            raise EagleError(
                f"the last states in {self._source} are from after the final norm already (their root mean "
                "square without its weights is 1): give --last-state after-norm"
            )
        return self._after_norm(last)

    def _root_mean_squares(self, last: Tensor) -> Tensor:
        """[S] of the states [S, h], with the final norm's weights taken out."""
        told = self._gain.abs() > _LEAST_GAIN
        plain = (last.float() - self._shift)[:, told] / self._gain[told]
        return plain.square().mean(dim=-1).sqrt()

    def _check_target(self, sample: Sample) -> None:
        width, target = sample.last.shape[1], self._target
        if width != target.hidden_size:
            raise EagleError(
                f"the states in {self._source} are {width} wide, and those of --target {target.name} "
                f"{target.hidden_size}: give the target they were taken from"
            )
        largest = int(sample.input_ids.max()) if len(sample.input_ids) else 0
        if largest >= target.vocab_size:
            raise EagleError(
                f"{self._source} has token id {largest}, and --target {target.name} has {target.vocab_size} "
                "of them: give the target it was made for"
            )


def without_glue(mask: Tensor, input_ids: Tensor, ends: Tensor) -> tuple[Tensor, int]:
    """The mask without what follows the end of a turn before it next falls to 0, and how many that were.

    The target stops when it has sampled an end-of-turn token. What a chat template writes behind it, such as
    a line break, is no choice of the target's, though masks made from text mark it as part of the answer.

    mask [T] bool; input_ids [T]; ends: ids that end a turn.
    """
    ended = (torch.isin(input_ids, ends) & mask).long()
    before = ended.cumsum(0) - ended  # turns that have ended before each token
    starts = mask.clone()
    starts[1:] &= ~mask[:-1]
    at_start = torch.where(starts, before, 0).cummax(0).values  # those before the token's run of the mask
    glue = mask & (before > at_start)
    return mask & ~glue, int(glue.sum())


class ShardParts:
    """Rows held until they fill a shard."""

    def __init__(self, hidden_size: int, storage: StorageFormat, every_last: bool = False) -> None:
        self._parts: list[tuple[TokenBatch, States]] = []
        self.sizes = self._none = ShardSizes(0, 0, 0, hidden_size, storage, every_last)

    def add(self, batch: TokenBatch, states: States) -> None:
        self._parts.append((batch, states))
        self.sizes = replace(
            self.sizes,
            rows=self.sizes.rows + 1,
            tokens=self.sizes.tokens + len(batch.input_ids),
            supervised=self.sizes.supervised + len(states.last),
        )

    def take(self) -> FeatureShard:
        """The rows so far as a shard; starts an empty one."""
        builder = ShardBuilder(self.sizes)
        for batch, states in self._parts:
            builder.add(batch, states)
        self._parts, self.sizes = [], self._none
        return builder.shard()


def write_shards(
    samples: Iterable[tuple[SampleFile, Sample | RejectedError]],
    finisher: Finisher,
    parts: ShardParts,
    writer: ArtifactWriter,
    tally: Tally,
    shard_bytes: int,
) -> Iterator[Tally]:
    """Packs the samples, and commits a shard whenever one is full; yields the count after each sample."""
    number = len(writer.committed)
    for file, sample in samples:
        tally.files += 1
        try:
            if isinstance(sample, RejectedError):
                raise sample
            finished = finisher.finish(sample, tally)
            if finished is not None:
                parts.add(*finished)
        except RejectedError as reason:
            tally.reject(file.name, str(reason))
        yield tally
        if parts.sizes.rows and parts.sizes.bytes >= shard_bytes:
            _commit(parts.take(), number, writer, tally)
            number += 1
    if parts.sizes.rows:
        _commit(parts.take(), number, writer, tally)


def _commit(shard: FeatureShard, number: int, writer: ArtifactWriter, tally: Tally) -> None:
    """Leaves the shard to the writer's thread, which has it stored while the next files are read."""
    writer.add_shard(
        shard_name(number),
        shard.to_bytes(),
        rows=len(shard.row_ids),
        note=tally.model_dump(),
        wait=False,
    )


def _norm_weights(norm: nn.Module, target: Target) -> tuple[Tensor, Tensor]:
    """Gain and shift [h] in float32 that a norm gives to a state of mean 0 and root mean square 1.

    Found by giving it two such states, so that every kind of norm tells: with and without mean, with weights
    that count from 0 or from 1.
    """
    with torch.inference_mode():
        probe = torch.ones(2, target.hidden_size, dtype=torch.float32, device=target.device)
        probe[0, 1::2] = -1
        probe[1] = -probe[0]
        up, down = norm(probe.to(target.dtype)).float()
        return (up - down) / 2 * probe[0], (up + down) / 2
