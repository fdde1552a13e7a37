"""Speculative output is plain decoding's, token for token, in float32, whatever drafts, how, beside what."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from stages.decoding import (
    CostPlanner,
    Costs,
    Drafter,
    EagleModel,
    Engine,
    FixedPlanner,
    GenerationRequest,
    SamplingParams,
    TreeConfig,
)
from stages.decoding.drafters import EagleDrafter, MedusaDrafter, ModelDrafter, NgramDrafter, OracleDrafter
from stages.heads import DraftHead, Eagle3Config, Eagle3Head, HeadOptions, init_from_target, make_head
from stages.prompts import read_prompts
from stages.targets import Target, load_target
from stages.targets.attention import SLOT_ATTENTION
from tests.decoding.test_families import FAMILIES, build

# Random cases on tiny random models.

CASES, FEW = 200, 16
ARCHITECTURES = (
    "gemma 2, window and caps",
    "gemma 3, window and wide heads",
    "mistral, window",
    "mixtral, experts",
    "phi 3, fused projections",
    "qwen 2, biases",
    "qwen 3, experts",
    "granite, scaled logits",
)
TREES = (
    "chain:depth=4",
    "static:0,1,2,0.0,0.1,1.0,0.0.0",
    "dynamic:depth=4,width=3,nodes=12,min_prob=0,expand_prob=0",
    "dynamic",
    "best:depth=5,width=2,nodes=9",
    "cost",
)
DRAFTERS = ("eagle3", "eagle3, two layers", "eagle1", "medusa", "ngram", "draft model", "oracle")


@cache
def family(name: str) -> Target:
    return Target(
        name=name,
        model=build(FAMILIES[name], SLOT_ATTENTION),
        tokenizer=SimpleNamespace(eos_token_id=299),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def head_of(target: Target, kind: str, **options: object) -> DraftHead:
    """Random, with the target's own output rows, so that it is right now and then."""
    torch.manual_seed(0)
    head = make_head(kind, target.config, target.vocab_size, options=HeadOptions(**options))  # type: ignore[arg-type]
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "norm.weight": target.decoder.norm.weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    init_from_target(head, weights)
    return head.eval().requires_grad_(False)


def drafter_of(kind: str, target: Target, slots: int) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(1, 3)
    if kind == "oracle":
        return OracleDrafter(0.7, target.vocab_size)
    if kind == "draft model":
        same = SimpleNamespace(tokenizer="the same")
        target.__dict__.setdefault("fingerprint", same)
        return ModelDrafter(target, target, slots=slots)
    if kind == "medusa":
        return MedusaDrafter(head_of(target, "medusa", heads=3))  # type: ignore[arg-type]
    layers = 2 if kind.endswith("two layers") else 1
    head = head_of(target, kind.split(",")[0], layers=layers)
    return EagleDrafter(head, slots=slots)  # type: ignore[arg-type]


def third_allowed(output: list[int]) -> Tensor:
    """Two thirds of the ids, others after each token; the end of sequence always."""
    allowed = torch.arange(300) % 3 != output[-1] % 3 if output else torch.ones(300, dtype=torch.bool)
    allowed[299] = True
    return allowed


def random_params(source: random.Random) -> SamplingParams:
    def sometimes(value: float, otherwise: float) -> float:
        return value if source.random() < 0.3 else otherwise

    return SamplingParams(
        max_new_tokens=source.randint(1, 24),
        temperature=source.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        top_p=sometimes(source.uniform(0.3, 0.99), 1.0),
        top_k=int(sometimes(source.randint(1, 60), 0)),
        min_p=sometimes(source.uniform(0.0, 0.2), 0.0),
        repetition_penalty=sometimes(source.uniform(0.7, 1.5), 1.0),
        presence_penalty=sometimes(source.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(source.uniform(-0.5, 1), 0.0),
        logit_bias={source.randrange(299): source.uniform(-4, 4)} if source.random() < 0.2 else {},
        token_mask=third_allowed if source.random() < 0.1 else None,
        seed=source.randrange(1 << 40),
        sample=source.randrange(3),
        stop_token_ids=frozenset(source.sample(range(299), 3)) if source.random() < 0.2 else frozenset(),
        ignore_eos=source.random() < 0.5,
    )


def run(engine: Engine, requests: list[GenerationRequest]) -> tuple[dict[str, list[int]], int]:
    """Outputs by request, and how many drafted tokens are in them."""
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    stats = {}
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for emission in engine.step():
            outputs[emission.id] += emission.tokens
            stats[emission.id] = emission.stats
    return outputs, sum(each.accepted for each in stats.values())


def check(number: int) -> tuple[str, int]:
    """One case; the drafter's kind and how many of its tokens were accepted."""
    source = random.Random(number)
    target = family(ARCHITECTURES[number % len(ARCHITECTURES)])
    kind, tree = source.choice(DRAFTERS), TreeConfig.parse(source.choice(TREES))
    batch = source.choice([1, 1, 2, 3, 4])
    requests = [
        GenerationRequest(
            str(i), [source.randrange(12) for _ in range(source.randint(1, 40))], random_params(source)
        )
        for i in range(source.randint(batch, batch + 1))
    ]
    plain: dict[str, list[int]] = {}
    for request in requests:
        plain |= run(Engine(target), [request])[0]
    drafter = drafter_of(kind, target, batch)
    if isinstance(drafter, OracleDrafter):
        for request in requests:
            drafter.know(request.prompt_ids, plain[request.id])
    costs = Costs({1: 1.0, 64: 1.1}, {1: 0.01})  # so cheap that drafting always looks worth it
    planner = CostPlanner(costs, tree) if tree.kind == "cost" else FixedPlanner(tree)
    layers = target.feature_layers if kind.startswith("eagle3") else None
    engine = Engine(target, slots=batch, layers=layers, drafter=drafter, planner=planner)
    drafted, accepted = run(engine, requests)
    assert drafted == plain, f"case {number}: {kind}, {tree}, {target.name}"
    return kind, accepted


def check_all(cases: range) -> dict[str, int]:
    """How many tokens of each kind of drafter were accepted; without any, equality would show nothing."""
    accepted = dict.fromkeys(DRAFTERS, 0)
    for number in cases:
        kind, count = check(number)
        accepted[kind] += count
    assert sum(accepted.values()) > 3 * len(cases)
    return accepted


def test_drafted_output_is_plain_output_in_some_random_cases() -> None:
    check_all(range(FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_drafted_output_is_plain_output_in_200_random_cases() -> None:
    assert min(check_all(range(FEW, FEW + CASES)).values()) > 0


# The embedded target.

HEADS = [os.environ.get("EAGLE_TEST_HEAD", ""), "runs/larger/head", "runs/demo/head"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("builtin:smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model(target: Target) -> EagleModel:
    """With a trained head where there is one, else with one that starts from the target's output rows."""
    for head in filter(None, HEADS):
        if (Path(head) / "manifest.json").is_file():
            return EagleModel.from_pretrained(target, head)
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.from_target(target.config, target.vocab_size))
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "norm.weight": target.decoder.norm.weight,
    }
    init_from_target(head, weights)
    return EagleModel(target, head.eval(), TreeConfig.parse("dynamic:min_prob=0,expand_prob=0"))


def prompts(target: Target) -> list[list[int]]:
    chosen = read_prompts("builtin:eval")[:20]
    return [target.render([{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_twenty_prompts_are_answered_the_same_with_and_without_the_head(
    model: EagleModel, target: Target, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=64, temperature=temperature, seed=11)
    accepted = 0
    for ids in prompts(target):
        plain = model.generate(ids, params, speculative=False)
        drafted = model.generate(ids, params)
        assert drafted.token_ids == plain.token_ids
        accepted += drafted.stats.accepted
        if temperature == 0:
            tensor = torch.tensor([ids])
            generated = target.model.generate(
                tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=64, do_sample=False
            )
            assert plain.token_ids == generated[0, len(ids) :].tolist()
    assert accepted > 0
