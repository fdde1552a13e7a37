"""The decode loop on a tiny random target in float32: the draft changes the speed, never the text."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from stages.decoding import (
    DecodeStats,
    EagleModel,
    Engine,
    FixedPlanner,
    GenerationRequest,
    SamplingParams,
    TreeConfig,
)
from stages.decoding.drafters import EagleDrafter, growing
from stages.decoding.planner import Cycle
from stages.errors import EagleError
from stages.heads import Eagle3Config, Eagle3Head
from stages.targets import FeatureTaps, Target, load_target
from tests.decoding.oracle import OracleDrafter, stacked
from tests.tiny import make_tiny_target


def decoder(target: Target, *, taps: bool = True) -> Engine:
    planner = FixedPlanner(TreeConfig())
    return Engine(target, layers=target.feature_layers if taps else None, planner=planner)


def decode(
    engine: Engine, prompt: list[int], params: SamplingParams, drafter=None
) -> tuple[list[int], DecodeStats]:
    engine.drafter = drafter
    engine.submit(GenerationRequest("", prompt, params))
    tokens, stats = [], DecodeStats()
    while engine.busy:
        for emission in engine.step():
            tokens += emission.tokens
            stats = emission.stats
    return tokens, stats


def random_prompt(source: random.Random, target: Target, longest: int = 90) -> list[int]:
    return [source.randrange(target.vocab_size - 3) for _ in range(source.randint(1, longest))]


def random_head(target: Target, seed: int = 0) -> Eagle3Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle3Head(Eagle3Config.from_target(target.config, target.vocab_size)).eval()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.5])
def test_speculative_output_equals_plain_output_for_any_tree(tiny_target: Target, temperature: float) -> None:
    source, loop, accepted = random.Random(temperature), decoder(tiny_target), 0
    for seed in range(12):
        prompt = random_prompt(source, tiny_target)
        filters = {"top_p": 0.9, "top_k": 40} if seed % 3 == 0 else {}
        params = SamplingParams(
            max_new_tokens=source.randint(1, 50), temperature=temperature, seed=seed, **filters
        )
        plain, _ = decode(loop, prompt, params)
        oracle = OracleDrafter(plain, tiny_target.vocab_size, right=source.choice([0.4, 0.8, 1.0]), seed=seed)
        speculative, stats = decode(loop, prompt, params, oracle)
        assert speculative == plain
        assert stats.tokens == len(plain) - 1 == sum(stats.accepted_per_depth) + stats.steps - _cut(stats)
        accepted += stats.accepted
    assert accepted > 50


def _cut(stats: DecodeStats) -> int:
    """Steps that ended without a token of the target's own behind the accepted ones (an end inside a
    block)."""
    return stats.accepted + stats.steps - stats.tokens


class _Told(FixedPlanner):
    """Notes how many sequences it is told about, and how many run beside them."""

    def __init__(self) -> None:
        super().__init__(TreeConfig.parse("chain:depth=2"))
        self.planned: list[tuple[int, int]] = []
        self.observed: list[tuple[int, int]] = []

    def plan(self, slots, left, beside=0):
        self.planned.append((len(slots), beside))
        return super().plan(slots, left, beside)

    def observe(self, cycle):
        self.observed.append((len(cycle.slots), cycle.beside))
        assert len(cycle.trees) == len(cycle.accepted) == len(cycle.slots)
        super().observe(cycle)


def test_the_planner_is_told_of_sequences_that_run_beside_those_that_draft(tiny_target: Target) -> None:
    told = _Told()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = EagleDrafter(random_head(tiny_target), slots=3)
    engine = Engine(tiny_target, slots=3, layers=tiny_target.feature_layers, drafter=drafter, planner=told)
    for name in range(3):
        engine.submit(GenerationRequest(str(name), [5, 6, 7 + name], params), drafts=name == 1)
    while engine.busy:
        engine.step()
    assert told.planned == told.observed
    assert told.planned[0] == (1, 2)


class _Late(FixedPlanner):
    """Keeps what it is told, as one may that looks at several cycles together."""

    def __init__(self) -> None:
        super().__init__(TreeConfig.parse("chain:depth=2"))
        self.kept: list[tuple[Cycle, str]] = []

    def observe(self, cycle):
        self.kept.append((cycle, repr(cycle)))
        super().observe(cycle)


def test_what_a_planner_is_told_of_a_cycle_stays_as_it_was(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is read beside it has the drafter catch up, in a pass of another cycle."""
    monkeypatch.setattr(growing, "MOST_WAITING", 8)
    late = _Late()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = EagleDrafter(random_head(tiny_target), slots=2)
    engine = Engine(tiny_target, slots=2, layers=tiny_target.feature_layers, drafter=drafter, planner=late)
    engine.submit(GenerationRequest("short", [5, 6, 7], params))
    engine.step()
    engine.submit(GenerationRequest("long", [8] * 20, params))
    while engine.busy:
        engine.step()
    assert len(late.kept) > 4
    assert all(repr(cycle) == then for cycle, then in late.kept)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_greedy_output_equals_transformers_generate(tmp_path, arch: str) -> None:
    target = load_target(str(make_tiny_target(tmp_path / arch, arch=arch)), device="cpu", dtype="float32")
    source, loop = random.Random(1), decoder(target, taps=False)
    for _ in range(6):
        prompt = random_prompt(source, target)
        ids = torch.tensor([prompt])
        expected = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False
        )
        assert (
            decode(loop, prompt, SamplingParams(max_new_tokens=30))[0] == expected[0, len(prompt) :].tolist()
        )


def test_a_long_prompt_is_prefilled_in_chunks_with_the_same_result(tiny_target: Target, monkeypatch) -> None:
    prompt = random_prompt(random.Random(3), tiny_target, 400) + list(range(100))
    params = SamplingParams(max_new_tokens=10)
    whole, _ = decode(decoder(tiny_target), prompt, params)
    monkeypatch.setattr("stages.decoding.engine.PREFILL_ROWS", 70)
    assert decode(decoder(tiny_target), prompt, params)[0] == whole


def test_the_drafter_gets_the_true_feature_of_every_token_and_the_token_after_it(tiny_target: Target) -> None:
    prompt, loop = random_prompt(random.Random(5), tiny_target), decoder(tiny_target)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    plain, _ = decode(loop, prompt, params)
    oracle = OracleDrafter(plain, tiny_target.vocab_size, right=0.8, seed=0)
    decode(loop, prompt, params, oracle)
    sequence = prompt + plain
    assert oracle.tokens == sequence[1 : len(oracle.tokens) + 1]
    with FeatureTaps(tiny_target.decoder, tiny_target.feature_layers) as taps, torch.no_grad():
        tiny_target.decoder(input_ids=torch.tensor([sequence]), use_cache=False)
        expected = taps.take()[0]
    features = stacked(oracle.features)
    torch.testing.assert_close(features, expected[: len(features)], rtol=1e-4, atol=1e-4)


def test_a_head_trained_on_other_feature_layers_gets_the_features_of_those(tiny_target: Target) -> None:
    config = Eagle3Config.from_target(tiny_target.config, tiny_target.vocab_size, (1, 3, 7))
    model = EagleModel(tiny_target, Eagle3Head(config).eval(), TreeConfig.parse("dynamic"))
    prompt, params = random_prompt(random.Random(6), tiny_target), SamplingParams(max_new_tokens=20)
    plain = model.generate(prompt, params, speculative=False).token_ids
    oracle = model.engine.drafter = OracleDrafter(plain, tiny_target.vocab_size, right=0.8, seed=0)
    assert model.generate(prompt, params).token_ids == plain
    with FeatureTaps(tiny_target.decoder, (1, 3, 7)) as taps, torch.no_grad():
        tiny_target.decoder(input_ids=torch.tensor([prompt + plain]), use_cache=False)
        expected = taps.take()[0]
    features = stacked(oracle.features)
    torch.testing.assert_close(features, expected[: len(features)], rtol=1e-4, atol=1e-4)


def test_an_engine_that_is_gone_leaves_no_hooks_on_its_target(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(tiny_target), "cpu", None)  # module by module, as on a GPU
    layers = tiny_target.feature_layers
    before = [len(layer._forward_pre_hooks) for layer in tiny_target.decoder.layers]
    engine = decoder(tiny_target)
    decode(engine, [5, 6, 7], SamplingParams(max_new_tokens=3))
    hooked = [len(layer._forward_pre_hooks) for layer in tiny_target.decoder.layers]
    assert hooked == [count + (i in layers) for i, count in enumerate(before)]
    del engine
    gc.collect()
    assert [len(layer._forward_pre_hooks) for layer in tiny_target.decoder.layers] == before


def test_output_ends_at_the_first_end_id_inside_an_accepted_block(tiny_target: Target) -> None:
    prompt, loop = random_prompt(random.Random(8), tiny_target), decoder(tiny_target)
    plain, _ = decode(loop, prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
    stop = plain[20]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop_token_ids=frozenset({stop}))
    oracle = OracleDrafter(plain, tiny_target.vocab_size, right=1.0, seed=0)
    assert decode(loop, prompt, params, oracle)[0] == plain[: plain.index(stop) + 1]


def test_output_stops_exactly_at_the_context_limit(tiny_target: Target) -> None:
    prompt = random_prompt(random.Random(9), tiny_target) * 600
    prompt = prompt[: tiny_target.max_length - 7]
    loop, params = decoder(tiny_target), SamplingParams(max_new_tokens=100, ignore_eos=True)
    plain, _ = decode(loop, prompt, params)
    assert len(plain) == 7
    assert decode(loop, prompt, params, OracleDrafter(plain, tiny_target.vocab_size, 1.0, 0))[0] == plain


@pytest.mark.parametrize("length", [0, 512])
def test_a_prompt_without_room_for_a_token_is_refused(tiny_target: Target, length: int) -> None:
    with pytest.raises(EagleError, match="1 to 511"):
        decode(decoder(tiny_target), [1] * length, SamplingParams())


def test_model_refuses_a_head_of_another_target_in_one_line(tiny_path: str, tmp_path) -> None:
    from stages.artifacts import ArtifactWriter
    from stages.heads import head_files

    other = load_target(str(make_tiny_target(tmp_path / "other", seed=1)), device="cpu", dtype="float32")
    uri = str(tmp_path / "head")
    with ArtifactWriter.open(uri, "head", {}, target=other.fingerprint) as writer:
        for name, data in head_files(random_head(other)).items():
            writer.add_file(name, data)
        writer.finish({})
    assert EagleModel.from_pretrained(other, uri).head is not None
    with pytest.raises(EagleError, match="weights"):
        EagleModel.from_pretrained(tiny_path, uri, device="cpu", dtype="float32")


def answers(model: EagleModel, requests: list[GenerationRequest], cancelled: str) -> dict[str, list[int]]:
    """Outputs of all requests but the one that is cancelled on the way; every third is decoded plainly."""
    engine, outputs = model.engine, {request.id: [] for request in requests}
    for number, request in enumerate(requests):
        engine.submit(request, drafts=number % 3 != 0)
    while engine.busy:
        for emission in engine.step():
            outputs[emission.id] += emission.tokens
        if len(outputs[cancelled]) > 5:
            engine.cancel(cancelled)
    del outputs[cancelled]
    return outputs


def test_padded_batches_as_on_a_gpu_give_what_rows_give(tiny_target: Target, tiny_path: str) -> None:
    padded = load_target(tiny_path, device="cpu", dtype="float32")
    padded.__dict__["cpu"] = None  # as where there are no CPU ops
    source, head = random.Random(4), random_head(tiny_target)
    requests = [
        GenerationRequest(
            str(seed),
            random_prompt(source, tiny_target),
            SamplingParams(max_new_tokens=source.randint(8, 40), temperature=0.4 * (seed % 3), seed=seed),
        )
        for seed in range(9)
    ]
    tree = TreeConfig.parse("dynamic:depth=2,width=8,nodes=20,min_prob=0,expand_prob=0")
    results = [
        answers(EagleModel(target, head, tree, max_batch=batch), requests, cancelled="4")
        for target, batch in ((tiny_target, 1), (tiny_target, 4), (padded, 4), (padded, 2))
    ]
    assert all(result == results[0] for result in results)
    assert all(len(tokens) > 0 for tokens in results[0].values())
