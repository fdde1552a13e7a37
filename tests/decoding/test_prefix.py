"""Prefix reuse: a prompt that begins as an earlier sequence did reads only the rest, with the same output and
the same drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import load_ops
from stages.decoding import (
    DecodeStats,
    DrafterChoice,
    Engine,
    FixedPlanner,
    GenerationRequest,
    SamplingParams,
    TreeConfig,
    make_drafter,
)
from stages.decoding.prefix import LEAST, Held, Place, WarmSlots
from stages.targets import Target, load_target
from tests.decoding.oracle import OracleDrafter, stacked
from tests.decoding.test_engine import decode, decoder, random_head

WIDE = TreeConfig.parse("dynamic:depth=2,width=8,nodes=20,min_prob=0,expand_prob=0")
"""So many guesses that a random head is right now and then."""


@pytest.fixture(scope="module")
def padded_target(tiny_path: str) -> Target:
    """Decodes as where there are no CPU ops: in padded batches, whose sequences change slots."""
    target = load_target(tiny_path, device="cpu", dtype="float32")
    target.__dict__["cpu"] = None
    return target


@pytest.fixture(scope="module")
def bf16_target(tiny_path: str) -> Target:
    if reason := load_ops():
        pytest.skip(f"no CPU ops: {reason}")
    return load_target(tiny_path, device="cpu", dtype="bfloat16")


def speculative(target: Target, slots: int, *, reuse: bool = True, drafter: str = "eagle3") -> Engine:
    head = random_head(target).to(target.dtype) if drafter == "eagle3" else None
    made = make_drafter(DrafterChoice.parse(drafter), target, head, slots=slots)
    layers = target.feature_layers if head is not None else None
    planner = FixedPlanner(WIDE)
    return Engine(target, slots=slots, layers=layers, drafter=made, planner=planner, prefix_reuse=reuse)


def texts(source: random.Random, size: int) -> list[int]:
    return [source.randrange(256) for _ in range(size)]


class Chats:
    """Conversations that grow, branch and are taken up again, as requests to an engine."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.system = texts(source, 24)
        self.known = [self.system]
        self.count = 0

    def ask(self) -> GenerationRequest:
        """A turn of some conversation so far, of a cut of it, or of a new one."""
        source = self.source
        before = source.choice(self.known[-6:])
        if source.random() < 0.2:
            before = before[: source.randint(1, len(before))]
        if source.random() < 0.1 or len(before) > 330:
            before = source.choice([self.system, []])
        prompt = before + texts(source, source.choice([0, 1, 5, 40]))
        params = SamplingParams(
            max_new_tokens=source.randint(1, 24),
            temperature=source.choice([0.0, 0.8]),
            seed=source.randrange(99),
            ignore_eos=source.random() < 0.5,
        )
        self.count += 1
        return GenerationRequest(str(self.count), prompt or [7], params)

    def answered(self, request: GenerationRequest, output: list[int]) -> None:
        self.known.append(request.prompt_ids + output)


def run(
    engine: Engine, chats: Chats, turns: int
) -> Iterator[tuple[GenerationRequest, bool, list[int], DecodeStats]]:
    """Requests that join, leave and are cancelled at any time, with what came of those that ended."""
    source, open_ones = chats.source, {}
    while turns or engine.busy:
        while turns and engine.room and source.random() < 0.6:
            request, drafts = chats.ask(), source.random() < 0.8
            engine.submit(request, drafts=drafts)
            open_ones[request.id] = (request, drafts, [])
            turns -= 1
        for emission in engine.step():
            request, drafts, output = open_ones[emission.id]
            output += emission.tokens
            if emission.finish_reason is not None:
                chats.answered(request, output)
                yield request, drafts, output, emission.stats
        if open_ones and source.random() < 0.05:
            engine.cancel(source.choice(list(open_ones)))


@pytest.mark.parametrize("kind", ["rows", "padded", "bf16"])
@pytest.mark.parametrize(("slots", "rows"), [(1, 512), (2, 64), (4, 9)])
def test_outputs_and_drafts_are_those_of_an_engine_that_reads_everything(
    kind: str, slots: int, rows: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"rows": "tiny_target", "padded": "padded_target", "bf16": "bf16_target"}
    target = request.getfixturevalue(names[kind])
    with monkeypatch.context() as patch:
        patch.setattr("stages.decoding.engine.PREFILL_ROWS", rows)  # some prompts are cancelled half-read
        ended = list(run(speculative(target, slots), Chats(random.Random(slots)), turns=20))
    fresh, reused = speculative(target, 1, reuse=False), 0
    drafter = fresh.drafter
    for asked, drafts, output, stats in ended:
        tokens, expected = decode(fresh, asked.prompt_ids, asked.params, drafter if drafts else None)
        assert output == tokens
        counts = [(s.steps, s.drafted, s.accepted) for s in (stats, expected)]
        assert counts[0] == counts[1]
        reused += stats.reused
    assert reused > 200


FIRST = SamplingParams(max_new_tokens=12, ignore_eos=True)
LATER = SamplingParams(max_new_tokens=30, temperature=0.7, seed=3, ignore_eos=True)


def read(engine: Engine, prompt: list[int], params: SamplingParams = FIRST) -> tuple[list[int], int]:
    """The output for a prompt, and the tokens of it that were read."""
    tokens, stats = decode(engine, prompt, params, engine.drafter)
    return tokens, len(prompt) - stats.reused


@pytest.mark.parametrize("drafter", ["none", "eagle3", "ngram:min=1,max=3"])
def test_the_next_turn_of_a_chat_reads_what_is_new_in_it(tiny_target: Target, drafter: str) -> None:
    engine = speculative(tiny_target, 2, drafter=drafter)
    prompt, turn = texts(random.Random(0), 50), texts(random.Random(1), 9)
    answer, count = read(engine, prompt)
    assert count == 50
    # The answer's last token is not in the cache yet, the rest is.
    later, count = read(engine, prompt + answer + turn, LATER)
    assert count == len(turn) + 1
    assert later == read(speculative(tiny_target, 1, reuse=False), prompt + answer + turn, LATER)[0]
    assert read(engine, texts(random.Random(2), 70))[1] == 70
    again, count = read(engine, prompt + answer + turn, LATER)
    assert (again, count) == (later, 1)


def test_the_drafter_gets_the_true_features_of_what_is_read(tiny_target: Target) -> None:
    engine = speculative(tiny_target, 1)
    prompt = texts(random.Random(5), 60)
    whole = OracleDrafter([], tiny_target.vocab_size, right=0.0, seed=0)
    decode(engine, prompt, LATER, whole)
    changed = [*prompt[:40], *texts(random.Random(6), 30)]
    part = OracleDrafter([], tiny_target.vocab_size, right=0.0, seed=0)
    _, stats = decode(engine, changed, LATER, part)
    assert stats.reused == 39  # the pair of the last common token holds the token after it
    full = OracleDrafter([], tiny_target.vocab_size, right=0.0, seed=0)
    decode(decoder(tiny_target), changed, LATER, full)
    assert part.tokens[: len(full.tokens) - 39] == full.tokens[39:]
    torch.testing.assert_close(
        stacked(part.features)[: len(full.tokens) - 39], stacked(full.features)[39:], rtol=0, atol=0
    )


def test_a_prompt_cancelled_half_read_is_taken_up_where_it_was_left(tiny_target: Target, monkeypatch) -> None:
    monkeypatch.setattr("stages.decoding.engine.PREFILL_ROWS", 20)
    engine, prompt = speculative(tiny_target, 1), texts(random.Random(0), 90)
    engine.submit(GenerationRequest("0", prompt, FIRST))
    engine.step()
    engine.step()
    engine.cancel("0")
    tokens, count = read(engine, prompt)
    assert count == 50
    assert tokens == read(speculative(tiny_target, 1, reuse=False), prompt)[0]


def test_a_prefix_of_a_running_sequence_is_copied(tiny_target: Target) -> None:
    engine, prompt = speculative(tiny_target, 2), texts(random.Random(0), 40)
    engine.submit(GenerationRequest("long", [*prompt, 1], SamplingParams(max_new_tokens=90, ignore_eos=True)))
    outputs: dict[str, list[int]] = {"long": [], "short": []}
    while not outputs["long"]:
        for emission in engine.step():
            outputs[emission.id] += emission.tokens
    engine.submit(GenerationRequest("short", [*prompt, 2, 3], LATER))
    while engine.busy:
        for emission in engine.step():
            outputs[emission.id] += emission.tokens
            if emission.id == "short":
                assert emission.stats.reused == 39
    assert outputs["short"] == read(speculative(tiny_target, 1, reuse=False), [*prompt, 2, 3], LATER)[0]
    assert len(outputs["long"]) == 90


def test_nothing_is_reused_after_a_step_that_failed(tiny_target: Target, monkeypatch) -> None:
    engine, prompt = speculative(tiny_target, 2), texts(random.Random(0), 40)
    read(engine, prompt)
    engine.submit(GenerationRequest("0", prompt, LATER))
    engine.step()
    monkeypatch.setattr(engine, "_extend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.cancel("0")
    monkeypatch.undo()
    assert read(engine, prompt)[1] == 40


def test_reuse_is_off_unless_asked_for(tiny_target: Target) -> None:
    engine, prompt = Engine(tiny_target), texts(random.Random(0), 40)
    assert [read(engine, prompt)[1] for _ in range(2)] == [40, 40]


def held(tokens: list[int], *, pairs: int = 0) -> Held:
    return Held(tokens, len(tokens) - 1, pairs)


def test_the_slot_with_most_of_the_prompt_is_taken_if_it_loses_little() -> None:
    a, b = list(range(100)), [*range(50), *range(500, 550)]
    warm = WarmSlots()
    warm.leave(2, held(a))
    warm.leave(0, held(b))
    assert warm.take([0, 1, 2], {}, [*a, 7], drafts=False) == Place(2, 2, 99)
    assert warm.take([0, 1, 2], {}, [*b[:70], 7], drafts=False) == Place(0, 0, 70)
    assert warm.take([0, 1, 2], {}, [*b[:70], 7], drafts=False) == Place(0, 0)  # neither holds anything now


def test_a_short_beginning_in_common_is_copied_to_an_empty_slot_or_to_the_oldest() -> None:
    long, other = list(range(300)), list(range(1000, 1300))
    prompt = [*range(40), 9, 9]
    warm = WarmSlots()
    for slot, tokens in ((2, other), (0, long)):
        warm.leave(slot, held(tokens, pairs=299))
    assert warm.take([0, 1, 2], {}, prompt, drafts=True) == Place(1, 0, 39, 39)
    assert warm.take([0, 2], {}, prompt, drafts=True) == Place(2, 0, 39, 39)
    assert warm.take([1], {3: held(long)}, prompt, drafts=False) == Place(1, 3, 40)
    assert warm.take([1], {3: held(long, pairs=30)}, prompt, drafts=True) == Place(1, 3, 30, 30)
    assert warm.take([1], {3: held(long[: LEAST - 1])}, prompt, drafts=False) == Place(1, 1)


@given(common=st.integers(0, 300), more=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_what_two_sequences_share_is_found_to_the_token(common: int, more: tuple[int, int]) -> None:
    a, b = ([5] * common + [kind] * size for kind, size in zip((1, 2), more, strict=True))
    assert Held(a, len(a), 0).shared([*b, 3], drafts=False) == common
