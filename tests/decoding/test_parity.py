"""The gate passes a head that is served as it was trained, and names what is wrong with one that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.decoding.parity import ParityRecord, ParityReport, check_parity, digest_of, gate
from stages.decoding.parity.replay import Cycles, ReplayedRow
from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.heads import DraftHead, Eagle3Head, HeadKind, head_of
from stages.progress import Reporter
from stages.targets import Target, load_target
from stages.train.parity import as_saved, expected
from tests.overfit import STEPS, answered_rows, overfitted_head
from tests.tiny import make_tiny_target

ROWS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = make_tiny_target(tmp_path_factory.mktemp("parity") / "tiny", vocab=300, hidden=32, max_length=160)
    return load_target(str(path), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def rows(target: Target) -> list[FeatureRow]:
    return answered_rows(target, ROWS, 20)


@pytest.fixture(scope="module")
def head(target: Target, rows: list[FeatureRow]) -> DraftHead:
    return as_saved(overfitted_head(target, rows))


@pytest.fixture(scope="module")
def record(head: DraftHead, rows: list[FeatureRow]) -> ParityRecord:
    record = expected(head, rows, STEPS)
    assert sum(int(row.lengths.sum()) for row in record.rows) > sum(len(row.lengths) for row in record.rows)
    return record


def check(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow], **more: Any
) -> ParityReport:
    return check_parity(target, head, record, rows, report=Reporter(quiet=True), **more)


def test_a_head_that_is_served_as_it_was_trained_passes(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow]
) -> None:
    found = check(target, head, ParityRecord.from_bytes(record.to_bytes(), "record"), rows)
    assert not found.failed
    assert found.predicted_tokens_per_step == found.measured_tokens_per_step > 1.5
    assert found.logits_compared > 1000
    assert found.logits_difference is not None
    assert found.logits_difference < 1e-4
    assert found.cause is None
    assert not found.warnings
    found.require("head")


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_so_do_the_other_kinds(target: Target, rows: list[FeatureRow], kind: HeadKind) -> None:
    head = as_saved(overfitted_head(target, rows[:4], kind, updates=40))
    found = check(target, head, expected(head, rows[:4], STEPS), rows[:4])
    assert not found.failed
    assert found.measured_tokens_per_step == pytest.approx(found.predicted_tokens_per_step, rel=0.02)
    assert found.measured_tokens_per_step > 1.2
    assert found.logits_difference is not None
    assert found.logits_difference < 1e-4


def test_in_bfloat16_rounding_alone_fails_nothing(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow]
) -> None:
    half = load_target(target.name, device="cpu", dtype="bfloat16")
    found = check(half, head, record, rows)
    assert found.states_difference is not None
    assert 0 < found.states_difference < 0.05
    assert found.logits_difference is not None
    assert found.logits_difference < 1e-4  # the head's maths, compared in float32
    assert not found.logits_differ
    assert not found.states_differ


def with_config(head: DraftHead, **changes: Any) -> DraftHead:
    broken = head_of(head.config.model_copy(update=changes))
    broken.load_state_dict(head.state_dict())
    return broken.eval().requires_grad_(False)


def layers_shifted(head: DraftHead) -> DraftHead:
    return with_config(head, feature_layers=(3, 5, 6))


def other_theta(head: DraftHead) -> DraftHead:
    return with_config(head, rope_theta=1e6)


def other_norm(head: DraftHead) -> DraftHead:
    return with_config(head, norm_output=True)


def shuffled_vocabulary(head: DraftHead) -> DraftHead:
    broken = copy.deepcopy(head)
    assert isinstance(broken, Eagle3Head)
    size = len(broken.d2t)
    shuffled = broken.draft_ids[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
    broken.d2t.copy_(shuffled - torch.arange(size))
    return broken


def other_embedding(head: DraftHead) -> DraftHead:
    broken = copy.deepcopy(head)
    assert isinstance(broken, Eagle3Head)
    broken.embed_tokens.weight.data.mul_(1.5)[:50].neg_()
    return broken


@pytest.mark.parametrize(
    ("breaking", "cause", "change"),
    [
        (layers_shifted, "feature layers", "the features of layers 2,4,5"),
        (other_theta, "RoPE", "RoPE rope_theta 10000"),
        (other_norm, "norm", "norm_output False"),
        (shuffled_vocabulary, "vocabulary map", "the draft vocabulary that t2d marks"),
        (other_embedding, "embedding", "the target's token embeddings"),
    ],
)
def test_a_broken_head_is_caught_its_fault_named_and_the_text_is_still_the_targets(
    target: Target,
    head: DraftHead,
    record: ParityRecord,
    rows: list[FeatureRow],
    breaking: Callable[[DraftHead], DraftHead],
    cause: str,
    change: str,
) -> None:
    broken = breaking(head)
    found = check(target, broken, record, rows)
    assert found.failed
    assert (found.cause, found.change) == (cause, change)
    with pytest.raises(EagleError, match=f"^head does not draft as .* the likely cause: {cause}, for with"):
        found.require("head")
    model = EagleModel(target, broken, TreeConfig.parse("chain:depth=3"))
    prompt, params = rows[3].input_ids.tolist()[:12], SamplingParams(max_new_tokens=20)
    assert (
        model.generate(prompt, params).token_ids
        == model.generate(prompt, params, speculative=False).token_ids
    )


def test_a_fault_of_the_decode_loop_is_not_laid_on_the_head(
    target: Target,
    head: DraftHead,
    record: ParityRecord,
    rows: list[FeatureRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgetful(EagleModel):
        """Verifies drafts and keeps none of them."""

        def stream(self, *args: Any, **kwargs: Any) -> Iterator[list[int]]:
            for tokens in super().stream(*args, **kwargs):
                yield from ([token] for token in tokens)

    monkeypatch.setattr(gate, "EagleModel", Forgetful)
    found = check(target, head, record, rows)
    assert found.failed
    assert found.cause == "decode loop"


def test_rows_that_were_sampled_are_compared_where_greedy_decoding_says_the_same(
    target: Target, head: DraftHead
) -> None:
    sampled = answered_rows(target, 6, 20, temperature=0.1)
    found = check(target, head, expected(head, sampled, STEPS), sampled)
    assert found.predicted_tokens_per_step == found.measured_tokens_per_step > 1
    assert found.cycles > 20
    assert not found.failed


def test_a_weight_that_nothing_explains_is_caught_all_the_same(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow]
) -> None:
    broken = copy.deepcopy(head)
    assert isinstance(broken, Eagle3Head)
    broken.fc.weight.data[:, :32] = 0
    found = check(target, broken, record, rows)
    assert found.failed
    assert found.cause is None
    with pytest.raises(EagleError, match=r"none of RoPE, norm, embedding explains it$"):
        found.require("head")


def test_another_template_is_pointed_out(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow], tmp_path: Path
) -> None:
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = template.replace("assistant", "bot")
    try:
        (warning,) = check(target, head, record, rows).warnings
    finally:
        target.tokenizer.chat_template = template
    assert warning.startswith("8 of 8 held-out prompts do not end as the target's chat template ends them")


def replayed(pairs: list[tuple[int, int]]) -> list[ReplayedRow]:
    """Rows of 40 steps with so many drafts accepted, predicted and measured."""
    return [ReplayedRow(Cycles(40, predicted), Cycles(40, measured)) for predicted, measured in pairs]


def test_the_interval_says_whether_a_gap_is_chance() -> None:
    low, high = gate._interval(replayed([(60, 50), (60, 70), (60, 40), (60, 65), (60, 45)])) or (0, 0)
    assert low < 0.05 < high  # 6 % on average, and no verdict
    low, high = gate._interval(replayed([(60, 50), (60, 51), (60, 49), (60, 50), (60, 50)])) or (0, 0)
    assert 0.05 < low < 0.1 < high
    assert gate._interval(replayed([(60, 0)] * 3)) is None


def test_rows_of_other_conversations_and_broken_records_are_refused(
    target: Target, head: DraftHead, record: ParityRecord, rows: list[FeatureRow]
) -> None:
    other = ParityRecord(record.steps, record.probes, ())
    with pytest.raises(EagleError, match="none of the held-out conversations"):
        check(target, head, other, rows)
    with pytest.raises(
        EagleError, match=r"^x is no record of what training expects \(.*: train the head again$"
    ):
        ParityRecord.from_bytes(record.to_bytes()[:-8], "x")
    assert digest_of(rows[0].input_ids) != digest_of(rows[1].input_ids)
