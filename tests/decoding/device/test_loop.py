"""The device loop, run on the CPU: what it puts out is what the host's cycles put out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stages.decoding import (
    Emission,
    Engine,
    FixedPlanner,
    GenerationRequest,
    SamplingParams,
    TreeConfig,
)
from stages.decoding.device import Entry
from stages.decoding.device.graphs import batch_sizes
from stages.decoding.device.letter import Letter
from stages.decoding.drafters import Drafter, EagleDrafter, OracleDrafter
from stages.heads import Eagle1Config, Eagle1Head
from stages.targets import Target, load_target
from stages.targets.attention import SLOT_ATTENTION
from tests.decoding.test_engine import random_head, random_prompt
from tests.decoding.test_families import FAMILIES, build

DYNAMIC = "dynamic:depth=3,width=3,nodes=8,min_prob=0,expand_prob=0"
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "normal"])


def on_the_device(
    target: Target,
    drafter: Drafter | None,
    tree: str,
    *,
    slots: int,
    overlap: bool = True,
    fused: bool = False,
    prefix_reuse: bool = False,
) -> Engine:
    engine = on_the_host(target, drafter, tree, slots=slots, overlap=True, prefix_reuse=prefix_reuse)
    assert engine.device is not None
    engine.device.overlap = overlap
    engine.device._debug = True
    engine.device._runs[0].cycle._fused = fused
    return engine


def on_the_host(
    target: Target,
    drafter: Drafter | None,
    tree: str,
    *,
    slots: int,
    overlap: bool | None = None,
    prefix_reuse: bool = False,
) -> Engine:
    return Engine(
        target,
        slots=slots,
        layers=target.feature_layers,
        drafter=drafter,
        planner=FixedPlanner(TreeConfig.parse(tree)),
        prefix_reuse=prefix_reuse,
        overlap=overlap,
    )


def steps(engine: Engine, requests: list[GenerationRequest], *, plain: bool = False) -> Iterator[Emission]:
    for number, request in enumerate(requests):
        engine.submit(request, drafts=not plain and number % 4 != 3)
    while engine.busy:
        yield from engine.step()


def outputs(engine: Engine, requests: list[GenerationRequest], *, plain: bool = False) -> dict[str, list]:
    """The tokens of each request, and why it ended."""
    found: dict[str, list] = {request.id: [] for request in requests}
    for emission in steps(engine, requests, plain=plain):
        found[emission.id] += emission.tokens
        if emission.finish_reason is not None:
            found[emission.id].append(emission.finish_reason)
    return found


def mixed_requests(target: Target, count: int, seed: int = 0) -> list[GenerationRequest]:
    source, requests = random.Random(seed), []
    for number in range(count):
        params = SamplingParams(
            max_new_tokens=source.randint(1, 40),
            temperature=(0.0, 0.7, 1.0)[number % 3],
            seed=source.randrange(2**40) - 2**39,
            top_k=20 if number % 4 == 1 else 0,
            top_p=0.8 if number % 5 == 2 else 1.0,
            min_p=0.02 if number % 7 == 4 else 0.0,
            presence_penalty=0.5 if number % 6 == 5 else 0.0,  # of the host's cycles
            ignore_eos=number % 2 == 0,
        )
        requests.append(GenerationRequest(str(number), random_prompt(source, target), params))
    return requests


@pytest.mark.parametrize(
    ("tree", "slots", "overlap"),
    [(DYNAMIC, 5, True), (DYNAMIC, 3, False), ("chain:depth=4", 3, True), ("cost", 2, True)],
)
def test_mixed_requests_put_out_what_they_do_on_the_host(tiny_target, tree, slots, overlap):
    requests, head = mixed_requests(tiny_target, 13), random_head(tiny_target)
    expected = outputs(on_the_host(tiny_target, None, "none", slots=4), requests, plain=True)
    engine = on_the_device(tiny_target, EagleDrafter(head, slots=slots), tree, slots=slots, overlap=overlap)
    assert outputs(engine, requests) == expected
    assert not engine.busy


def test_in_bfloat16_the_text_is_the_hosts_too(tiny_path):
    target = load_target(tiny_path, device="cpu", dtype="bfloat16")
    requests = mixed_requests(target, 8, seed=1)
    expected = outputs(on_the_host(target, None, "none", slots=4), requests, plain=True)
    drafter = EagleDrafter(random_head(target).bfloat16(), slots=3)
    assert outputs(on_the_device(target, drafter, DYNAMIC, slots=3), requests) == expected


def test_without_cpu_ops_the_kernels_references_give_the_same(tiny_path, tiny_target, monkeypatch):
    requests, head = mixed_requests(tiny_target, 8, seed=2), random_head(tiny_target)
    expected = outputs(on_the_host(tiny_target, None, "none", slots=4), requests, plain=True)
    target = load_target(tiny_path, device="cpu", dtype="float32")
    target.__dict__["cpu"] = None
    monkeypatch.setattr("stages.targets.attention.load_ops", lambda: "left out")
    engine = on_the_device(target, EagleDrafter(head, slots=3), DYNAMIC, slots=3)
    assert outputs(engine, requests) == expected


def test_with_the_lm_head_in_the_acceptance_the_text_is_the_same(tiny_target):
    requests, head = mixed_requests(tiny_target, 9, seed=3), random_head(tiny_target)
    expected = outputs(on_the_host(tiny_target, None, "none", slots=4), requests, plain=True)
    engine = on_the_device(tiny_target, EagleDrafter(head, slots=3), "chain:depth=2", slots=3, fused=True)
    assert outputs(engine, requests) == expected


def test_an_eagle_1_head_drafts_from_the_last_states(tiny_target):
    requests = mixed_requests(tiny_target, 6, seed=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle1Head(Eagle1Config.from_target(tiny_target.config, tiny_target.vocab_size)).eval()
    expected = outputs(on_the_host(tiny_target, None, "none", slots=3), requests, plain=True)
    engine = on_the_device(tiny_target, EagleDrafter(head, slots=3), DYNAMIC, slots=3)
    assert outputs(engine, requests) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_decodes_as_transformers_does(family):
    """Three sequences, drafts that are right four times of five, accepted blocks of every length."""
    target = Target(
        name=family,
        model=build(FAMILIES[family], SLOT_ATTENTION),
        tokenizer=SimpleNamespace(eos_token_id=299),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    reference, source = build(FAMILIES[family], "eager"), random.Random(0)
    oracle, requests, expected = OracleDrafter(0.8, target.vocab_size), [], {}
    for number in range(3):
        prompt = random_prompt(source, target)
        ids = torch.tensor([prompt])
        answer = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20 + number, do_sample=False
        )
        expected[str(number)] = answer[0, len(prompt) :].tolist()
        oracle.know(prompt, expected[str(number)])
        params = SamplingParams(max_new_tokens=20 + number)
        requests.append(GenerationRequest(str(number), prompt, params))
    engine = on_the_device(target, oracle, "chain:depth=3", slots=3)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    stats = {}
    for emission in steps(engine, requests):
        found[emission.id] += emission.tokens
        stats[emission.id] = emission.stats
    assert found == expected
    assert sum(s.accepted for s in stats.values()) > 15
    assert all(s.tokens <= s.accepted + s.steps for s in stats.values())


def known(target: Target, prompt: list[int], params: SamplingParams, right: float = 1.0) -> tuple:
    """The plain output, and an oracle that knows how it would go on."""
    more = replace(params, max_new_tokens=60, ignore_eos=True, stop_token_ids=frozenset())
    plain = on_the_host(target, None, "none", slots=1)
    whole = [t for e in steps(plain, [GenerationRequest("", prompt, more)]) for t in e.tokens]
    oracle = OracleDrafter(right, target.vocab_size)
    oracle.know(prompt, whole)
    return whole, oracle


@LOOPS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_inside_a_block_and_the_cap_cut_exactly(tiny_target, temperature, overlap):
    prompt = random_prompt(random.Random(8), tiny_target)
    base = SamplingParams(temperature=temperature, seed=5)
    whole, oracle = known(tiny_target, prompt, base)
    for cap, stop in [(1, None), (2, None), (7, None), (40, whole[13]), (40, whole[14]), (40, whole[15])]:
        params = SamplingParams(
            max_new_tokens=cap,
            temperature=temperature,
            seed=5,
            ignore_eos=True,
            stop_token_ids=frozenset() if stop is None else frozenset({stop}),
        )
        wanted = whole[:cap] if stop is None else whole[: whole.index(stop) + 1]
        engine = on_the_device(tiny_target, oracle, "chain:depth=4", slots=2, overlap=overlap)
        reason = "length" if stop is None else "stop"
        assert outputs(engine, [GenerationRequest("0", prompt, params)]) == {"0": [*wanted, reason]}


@LOOPS
def test_the_context_ends_where_it_does_on_the_host(tiny_target, overlap):
    prompt = (random_prompt(random.Random(9), tiny_target) * 600)[: tiny_target.max_length - 7]
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    whole, oracle = known(tiny_target, prompt, params)
    engine = on_the_device(tiny_target, oracle, "chain:depth=5", slots=1, overlap=overlap)
    assert outputs(engine, [GenerationRequest("0", prompt, params)]) == {"0": [*whole[:7], "length"]}


def test_a_plain_request_beside_a_head_needs_no_room_of_its_drafter(tiny_target):
    """The head's rows are written for whoever is in the batch."""
    prompt = random_prompt(random.Random(3), tiny_target) * 400
    request = GenerationRequest("0", prompt[:300], SamplingParams(max_new_tokens=9, ignore_eos=True))
    expected = outputs(on_the_host(tiny_target, None, "none", slots=1), [request], plain=True)
    drafter = EagleDrafter(random_head(tiny_target), slots=1)
    engine = on_the_device(tiny_target, drafter, DYNAMIC, slots=1)
    assert outputs(engine, [request], plain=True) == expected
    assert drafter.cache.rows >= 309


@LOOPS
def test_requests_that_leave_make_room_and_disturb_nobody(tiny_target, overlap):
    requests, head = mixed_requests(tiny_target, 16, seed=6), random_head(tiny_target)
    expected = outputs(on_the_host(tiny_target, None, "none", slots=4), requests, plain=True)
    source = random.Random(1)
    drafter = EagleDrafter(head, slots=3)
    engine = on_the_device(tiny_target, drafter, DYNAMIC, slots=3, overlap=overlap)
    found: dict[str, list] = {request.id: [] for request in requests}
    waiting, cancelled = list(requests), set()
    while waiting or engine.busy:
        while waiting and source.random() < 0.4:
            engine.submit(waiting.pop())
        for emission in engine.step():
            assert emission.id not in cancelled
            found[emission.id] += emission.tokens
            if emission.finish_reason is not None:
                found[emission.id].append(emission.finish_reason)
            elif int(emission.id) % 3 == 0 and len(found[emission.id]) > 4:
                cancelled.add(emission.id)
        for request_id in cancelled:
            engine.cancel(request_id)
    assert len(cancelled) > 2
    for request_id, tokens in found.items():
        if request_id in cancelled:
            assert tokens == expected[request_id][: len(tokens)]
        else:
            assert tokens == expected[request_id]


def test_what_a_device_sequence_leaves_in_its_slot_serves_the_next_turn(tiny_target):
    head, texts = random_head(tiny_target), []
    for reuse in (False, True):
        drafter = EagleDrafter(head, slots=2)
        engine = on_the_device(tiny_target, drafter, DYNAMIC, slots=2, prefix_reuse=reuse)
        source, said, reused = random.Random(2), [], 0
        talks = [random_prompt(source, tiny_target, 30) for _ in range(2)]
        for turn in range(3):
            params = SamplingParams(max_new_tokens=20, temperature=0.5, seed=turn, ignore_eos=True)
            requests = [GenerationRequest(str(n), talk, params) for n, talk in enumerate(talks)]
            answers: dict[str, list[int]] = {"0": [], "1": []}
            for emission in steps(engine, requests):
                answers[emission.id] += emission.tokens
                reused += emission.stats.reused if emission.finish_reason else 0
            said.append(answers)
            asked = [random_prompt(source, tiny_target, 9) for _ in talks]
            talks = [talk + answers[str(n)] + asked[n] for n, talk in enumerate(talks)]
        texts.append(said)
        assert (reused > 60) == reuse
    assert texts[0] == texts[1]


@pytest.mark.parametrize("tree", [DYNAMIC, "dynamic:depth=4,width=2,nodes=5,min_prob=0.01", "chain:depth=2"])
def test_the_device_drafts_the_hosts_trees(tiny_target, tree):
    """Every tree of greedy sequences, of the same cycle from the same head, on both."""
    head = random_head(tiny_target)
    params, source = SamplingParams(max_new_tokens=20), random.Random(0)
    requests = [GenerationRequest(str(n), random_prompt(source, tiny_target), params) for n in range(3)]
    host = on_the_host(tiny_target, EagleDrafter(head, slots=1), tree, slots=1)
    device = on_the_device(tiny_target, EagleDrafter(head, slots=1), tree, slots=1)
    seen: list[list[tuple]] = [[], []]

    def watch_host(propose: Callable) -> Callable:
        def watched(slots, plans):
            found = propose(slots, plans)
            # Near the cap the host drafts less; the device lets what is too much be cut.
            if plans[0].depth == TreeConfig.parse(tree).depth:
                seen[0].append((found[0].tokens, found[0].parents))
            return found

        return watched

    def watch_device(draft: Callable) -> Callable:
        def watched(rows):
            found = draft(rows)
            if int(rows.left[0]) > TreeConfig.parse(tree).depth:
                size = int(found.drafted[0]) + 1
                seen[1].append(
                    tuple(tuple(part[0, :size].tolist()) for part in (found.tokens, found.parents))
                )
            return found

        return watched

    host.drafter.propose = watch_host(host.drafter.propose)
    device.device._drafts[0].draft = watch_device(device.device._drafts[0].draft)
    for number in range(len(requests)):
        both = [outputs(engine, requests[number : number + 1]) for engine in (host, device)]
        assert both[0] == both[1]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


def test_a_record_read_twice_or_too_early_fails_loudly():
    letter = Letter(torch.arange(6).view(2, 3))
    assert letter.read() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(RuntimeError, match="read twice, or before it was there"):
        letter.read()


def test_a_cycle_that_starts_from_a_row_of_one_who_left_fails_loudly(tiny_target):
    engine = on_the_device(tiny_target, None, "none", slots=2, overlap=False)
    loop = engine.device
    loop.join(0, [1, 2], Entry(5, 2, 9, frozenset(), SamplingParams(), drafts=False))
    loop._state.poison(0)
    with pytest.raises(RuntimeError, match="slot 0: a cycle has started from token -"):
        loop.step()


def test_batches_are_padded_to_a_few_sizes():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (1, 2, 3)
    assert batch_sizes(20) == (1, 2, 4, 8, 16, 20)
