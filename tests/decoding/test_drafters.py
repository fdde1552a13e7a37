"""Drafters: cached and batched, they propose what they would from scratch and alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoding import DecodeStats, Engine, FixedPlanner, GenerationRequest, SamplingParams, TreeConfig
from stages.decoding.drafters import (
    Drafter,
    EagleDrafter,
    MedusaDrafter,
    ModelDrafter,
    NgramDrafter,
    growing,
)
from stages.decoding.drafters.rows import DraftRows, Run
from stages.decoding.row_tensors import RowBuffers
from stages.decoding.tree import Prices, TreePlan
from stages.heads import DraftHead, HeadOptions, make_head
from stages.targets import SlotCache, Target, load_target
from tests.tiny import make_tiny_target

PLAN = TreeConfig.parse("dynamic:depth=4,width=3,nodes=10,min_prob=0,expand_prob=0").plan(9)
SAMPLED = SamplingParams(temperature=0.8, seed=3)


def random_head(
    target: Target, kind: str, seed: int = 0, vocabulary: int = 200, **options: object
) -> DraftHead:
    """Wide enough that its proposals differ from place to place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make_head(kind, target.config, vocabulary, options=HeadOptions(**options))  # type: ignore[arg-type]
        head.set_vocabulary(torch.randperm(target.vocab_size)[:vocabulary].sort().values)
        for parameter in head.parameters():
            parameter.data.normal_(std=0.25)
    return head.eval().requires_grad_(False)


HEADS: dict[str, Callable[[Target], DraftHead]] = {
    "eagle3": lambda target: random_head(target, "eagle3"),
    "eagle3, two layers and a window": lambda target: random_head(
        target, "eagle3", layers=2, sliding_window=5
    ),
    "eagle1": lambda target: random_head(target, "eagle1"),
    "medusa": lambda target: random_head(target, "medusa", heads=4),
}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what a test sets."""
    monkeypatch.setattr(growing, "MOST_WAITING", growing.MOST_WAITING)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Another model with the tiny target's tokenizer."""
    path = make_tiny_target(tmp_path_factory.mktemp("draft") / "model", seed=5, layers=7, hidden=32)
    return load_target(str(path), device="cpu", dtype="float32")


KINDS = [*HEADS, "draft model", "ngram"]


def make(kind: str, target: Target, small_model: Target, slots: int) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(1, 3)
    if kind == "draft model":
        return ModelDrafter(small_model, target, slots=slots)
    head = HEADS[kind](target)
    return MedusaDrafter(head) if kind == "medusa" else EagleDrafter(head, slots=slots)  # type: ignore[arg-type]


@dataclass
class Text:
    """A sequence, with what the target would say of each of its tokens."""

    ids: list[int]
    states: Tensor | None
    done: int = 0
    steps: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, source: random.Random, target: Target, state: str, length: int) -> Text:
        generator = torch.Generator().manual_seed(source.randrange(1 << 30))
        width = {"none": 0, "aux": 3, "last": 1}[state] * target.hidden_size
        states = torch.randn(length, width, generator=generator) if width else None
        # Few ids, so that there is something to look up.
        return cls([source.randrange(12) for _ in range(length + 1)], states)

    def branch(self, source: random.Random, known: int) -> Text:
        """A sequence that shares this one's first ``known`` pairs and then goes on otherwise."""
        other = Text([*self.ids], None if self.states is None else self.states.clone(), known)
        other.ids[known + 1 :] = [source.randrange(12) for _ in other.ids[known + 1 :]]
        if other.states is not None:
            other.states[known:] = other.states[known:].flip(-1)
        return other

    def take(self, count: int) -> tuple[Tensor | None, list[int]]:
        begin, self.done = self.done, self.done + count
        states = None if self.states is None else self.states[begin : self.done]
        return states, self.ids[begin + 1 : self.done + 1]


def extend(drafter: Drafter, slots: Sequence[int], texts: Sequence[Text], counts: Sequence[int]) -> None:
    taken = [text.take(count) for text, count in zip(texts, counts, strict=True)]
    states = [states for states, _ in taken if states is not None]
    drafter.extend(slots, torch.cat(states) if states else None, [tokens for _, tokens in taken])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_drafter_proposes_depends_on_its_sequence_alone(
    kind: str, tiny_target: Target, small_model: Target, data: st.DataObject
) -> None:
    """Whatever else is in the batch, however the pairs came, what was drafted between, and what was
    taken over of another sequence: the same as from a fresh drafter that is given all pairs at once.
    """
    source = random.Random(data.draw(st.integers(0, 1 << 30)))
    growing.MOST_WAITING = source.choice([3, 512])  # verified tokens are run sooner or later
    drafter = make(kind, tiny_target, small_model, slots=4)
    batch = {slot: Text.random(source, tiny_target, drafter.state, 45) for slot in (0, 1, 2)}
    for slot, text in batch.items():
        drafter.start(slot, text.ids[: source.randint(1, 9)], SamplingParams())
    for _ in range(source.randint(1, 5)):
        slots = source.sample(sorted(batch), source.randint(1, 3))
        counts = [source.randint(1, 6) if batch[slot].done < 24 else 1 for slot in slots]
        extend(drafter, slots, [batch[slot] for slot in slots], counts)
        some = [slot for slot in slots if batch[slot].done and source.random() < 0.7]
        drafter.propose(some, [PLAN if source.random() < 0.8 else TreePlan.none() for _ in some])
        begun = [slot for slot in batch if batch[slot].done]
        if begun and source.random() < 0.3:
            parent = source.choice(begun)
            slot = source.choice([parent, *(slot for slot in range(4) if slot not in batch)])
            known = source.randint(1, batch[parent].done)
            batch[slot] = batch[parent].branch(source, known)
            given = None if slot == parent and source.random() < 0.5 else parent
            drafter.start(slot, batch[slot].ids[: known + 5], SamplingParams(), known, given)
            extend(drafter, [slot], [batch[slot]], [source.randint(1, 3)])
    begun = [slot for slot in batch if batch[slot].done]
    proposed = drafter.propose(begun, [PLAN] * len(begun))
    for slot, tree in zip(begun, proposed, strict=True):
        text = batch[slot]
        fresh = make(kind, tiny_target, small_model, slots=1)
        fresh.start(0, text.ids[:1], SamplingParams())
        again = Text(text.ids, text.states)
        extend(fresh, [0], [again], [text.done])
        assert fresh.propose([0], [PLAN]) == [tree]
        assert tree.tokens[0] == text.ids[text.done]
        if kind != "ngram":
            assert tree.drafted == PLAN.nodes
            assert max(tree.depths) > 1


def by_place(output: Sequence[int]) -> Tensor:
    """Lets follow every seventh id, which ones by the length and the last token of the output."""
    first = (3 * len(output) + sum(output[-1:])) % 7
    return torch.arange(512) % 7 == first


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "draft model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_a_mask_forbids_is_not_drafted(
    kind: str, temperature: float, tiny_target: Target, small_model: Target
) -> None:
    drafter = make(kind, tiny_target, small_model, slots=1)
    text = Text.random(random.Random(2), tiny_target, drafter.state, 20)
    params = SamplingParams(temperature=temperature, token_mask=by_place)
    drafter.start(0, text.ids[:9], params)
    for count in (5, 4, 6):  # the prompt in two pieces, then some output
        extend(drafter, [0], [text], [count])
    tree = drafter.propose([0], [PLAN])[0]
    assert max(tree.depths) > 1
    for node in range(1, len(tree.tokens)):
        path, at = [], tree.parents[node]
        while at > 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        assert by_place([*text.ids[9:16], *path])[tree.tokens[node]]


def test_a_mask_that_leaves_no_draft_token_changes_nothing(tiny_target: Target, small_model: Target) -> None:
    trees, others = [], torch.ones(tiny_target.vocab_size, dtype=torch.bool)
    others[HEADS["eagle3"](tiny_target).draft_ids] = False  # type: ignore[union-attr]
    for mask in (None, lambda _: others):
        drafter = make("eagle3", tiny_target, small_model, slots=1)
        text = Text.random(random.Random(2), tiny_target, drafter.state, 20)
        drafter.start(0, text.ids[:9], SamplingParams(token_mask=mask))
        extend(drafter, [0], [text], [8])
        trees += drafter.propose([0], [PLAN])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3, two layers and a window", "eagle1"])
def test_every_path_of_a_tree_is_scored_as_a_chain_from_scratch(kind: str, tiny_target: Target) -> None:
    """The head run over the prefix and the path at once, its own state fed back, gives each child's place
    among its siblings and each node its own children."""
    head = HEADS[kind](tiny_target)
    drafter = EagleDrafter(head)  # type: ignore[arg-type]
    drafter.one_op = False
    text = Text.random(random.Random(1), tiny_target, drafter.state, 9)
    drafter.start(0, text.ids[:1], SamplingParams())
    extend(drafter, [0], [text], [9])
    growth_tree = drafter.propose([0], [PLAN])[0]
    growth = drafter._sequences[0].growth
    assert growth is not None
    checked = 0
    for node in range(growth.candidates):
        path: list[int] = []
        at = growth.parent(node)
        while at >= 0:
            path.insert(0, growth.token(at))
            at = growth.parent(at)
        log_probs = from_scratch(head, text, path)
        place = (head.draft_ids == growth.token(node)).nonzero().item()
        parent = growth.score(growth.parent(node)) if growth.parent(node) >= 0 else 0.0
        assert growth.score(node) - parent == pytest.approx(float(log_probs[place]), rel=1e-4, abs=1e-3)
        checked = max(checked, len(path) + 1)
    assert checked >= 3
    assert growth_tree.drafted == PLAN.nodes


def from_scratch(head: DraftHead, text: Text, path: list[int]) -> Tensor:
    """log-softmax over the draft vocabulary behind the path, [Vd]."""
    assert text.states is not None
    feature, tokens = head.fuse(text.states), torch.tensor(text.ids[1:])  # type: ignore[union-attr]
    for token in [*path, None]:
        count = len(tokens)
        positions = torch.arange(count)
        near = positions[:, None] - positions
        window = head.config.sliding_window or count  # type: ignore[union-attr]
        mask = (near >= 0) & (near < window)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            return out[0].transpose(0, 1)

        hidden = head(tokens, feature, positions, attend)[-1:]
        if token is not None:
            feature = torch.cat((feature, head.feedback(hidden)))  # type: ignore[union-attr]
            tokens = torch.cat((tokens, torch.tensor([token])))
    return head.logits(hidden)[0].log_softmax(-1)


TREES = [
    "chain:depth=4",
    "static:0,1,0.0,0.1,1.0,0.0.1",
    "dynamic:depth=4,width=3",
    "best:nodes=9,depth=5",
    "cost",
]
SWITCHES = {
    "none": {},
    "norms before": {"norm_before_fc": True, "norm_before_residual": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "two layers and a window": {"layers": 2, "sliding_window": 5},
}


@pytest.mark.parametrize("kind", [*SWITCHES, "eagle1"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cycle_as_one_op_drafts_and_learns_what_its_steps_do(
    kind: str, tiny_target: Target, data: st.DataObject
) -> None:
    source = random.Random(data.draw(st.integers(0, 1 << 30)))
    options = SWITCHES.get(kind, {})
    head = random_head(tiny_target, "eagle1" if kind == "eagle1" else "eagle3", **options)
    odd = source.choice([None, None, float("nan"), float("inf"), 1e6])  # no candidate is made of NaN
    if odd is not None:
        head.lm_head.weight[source.randrange(200)] = odd  # type: ignore[union-attr]
    whole, stepwise = (EagleDrafter(head, slots=3) for _ in range(2))  # type: ignore[arg-type]
    if not whole.one_op:
        pytest.skip("the CPU ops are not loaded in this process")
    stepwise.one_op = False
    texts = [Text.random(random.Random(i), tiny_target, whole.state, 60) for i in range(3)]
    params = [SamplingParams(temperature=source.choice([0.0, 0.0, 0.7, 1.3]), seed=i) for i in range(3)]
    for slot in range(3):
        for drafter in (whole, stepwise):
            drafter.start(slot, texts[slot].ids[:4], params[slot])
    placed = set()
    for _ in range(6):
        slots = source.sample(range(3), source.randint(1, 3))
        given = [texts[slot].take(source.randint(1, 7)) for slot in slots]
        states = torch.cat([states for states, _ in given if states is not None])
        config = TreeConfig.parse(source.choice(TREES))
        prices = None
        if config.kind == "cost":
            node, row = source.uniform(0, 0.1), source.uniform(0, 0.1)
            count = len(slots) * config.nodes
            prices = Prices(tuple(node * k for k in range(count + 1)), tuple(row * k for k in range(13)))
        plans = [replace(config.plan(source.randint(1, 9)), prices=prices) for _ in slots]
        found = []
        for drafter in (whole, stepwise):
            drafter.extend(slots, states, [tokens for _, tokens in given])
            found.append((drafter.propose(slots, plans), drafter.passes))
        assert found[0] == found[1]
        if whole.rows is not None:
            lengths = [texts[slot].done for slot in slots]
            rows = RowBuffers().of_trees(slots, lengths, found[0][0])
            assert whole.rows.lengths == lengths
            assert all(map(torch.equal, whole.rows[1:], rows[1:]))
        placed.add(whole.rows is not None)
        # The first draft of each tree is right, so that there is something to learn further down.
        for slot, tree in zip(slots, found[0][0], strict=True):
            texts[slot].ids[texts[slot].done + 1] = tree.tokens[1] if tree.drafted else 5
    assert True in placed
    for one in params:
        for depth in range(1, 6):
            assert whole.ranking.strength.at(one.temperature, depth) == stepwise.ranking.strength.at(
                one.temperature, depth
            )
        ours, theirs = (d.calibrations.at(one.temperature).numbers for d in (whole, stepwise))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_what_is_learned_is_of_the_last_tree_though_two_were_asked_for(tiny_target: Target) -> None:
    """The second by steps, as nothing is left to run."""
    found = []
    for asked in (1, 2):
        drafter = EagleDrafter(HEADS["eagle3"](tiny_target))  # type: ignore[arg-type]
        text = Text.random(random.Random(3), tiny_target, "aux", 20)
        drafter.start(0, text.ids[:1], SamplingParams())
        extend(drafter, [0], [text], [8])
        plans = [TreeConfig.parse("chain:depth=1").plan(1), PLAN]
        for plan in plans[-asked:]:
            drafter.propose([0], [plan])
        extend(drafter, [0], [text], [3])
        found.append(drafter.calibrations.at(0).numbers)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_static_trees_that_differ_are_each_grown_as_asked_for(tiny_target: Target) -> None:
    drafter = EagleDrafter(HEADS["eagle3"](tiny_target), slots=2)  # type: ignore[arg-type]
    texts = [Text.random(random.Random(i), tiny_target, "aux", 8) for i in range(2)]
    for slot in range(2):
        drafter.start(slot, texts[slot].ids[:1], SamplingParams())
    extend(drafter, [0, 1], texts, [8, 8])
    plans = [TreeConfig.parse(tree).plan(9) for tree in ("static:0,1,1.0", "static:0,0.0,0.0.0,0.0.0.1")]
    shapes = [tree.parents for tree in drafter.propose([0, 1], plans)]
    assert shapes == [(-1, 0, 0, 2), (-1, 0, 1, 2, 3)]


def test_medusa_ranks_each_level_by_its_own_head(tiny_target: Target) -> None:
    head = HEADS["medusa"](tiny_target)
    drafter = MedusaDrafter(head)  # type: ignore[arg-type]
    text = Text.random(random.Random(2), tiny_target, "last", 5)
    assert text.states is not None
    drafter.start(0, text.ids[:1], SamplingParams())
    extend(drafter, [0], [text], [5])
    tree = drafter.propose([0], [TreeConfig.parse("chain:depth=9").plan(9)])[0]
    best = head.logits(head(text.states[-1:]))[:, 0].argmax(-1)
    assert list(tree.tokens[1:]) == head.draft_ids[best].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_draft_model_that_is_the_target_is_always_right(tiny_target: Target, temperature: float) -> None:
    """At a temperature too, once the strength of the noise has been found: the two then draw alike."""
    planner = FixedPlanner(TreeConfig.parse("chain:depth=3"))
    drafter = ModelDrafter(tiny_target, tiny_target)
    stats = decode(tiny_target, drafter, planner, SamplingParams(200, temperature, ignore_eos=True))
    assert stats.accepted > (0.99 if temperature == 0 else 0.8) * stats.drafted
    if temperature:
        assert drafter.ranking.strength.at(temperature, 1) == 1.0


def decode(target: Target, drafter: Drafter, planner: FixedPlanner, params: SamplingParams) -> DecodeStats:
    engine = Engine(target, drafter=drafter, planner=planner)
    engine.submit(GenerationRequest("", [5, 6, 7], params))
    while engine.busy:
        last = engine.step()[-1]
    return last.stats


def test_the_rows_of_a_pass_are_the_same_with_the_ops_of_the_cpu_and_without() -> None:
    if not hasattr(torch.ops.eagle_cpu, "attend"):
        pytest.skip("the CPU ops are not loaded in this process")
    runs = [
        Run(2, 0, 3, length=7, words=(0b001, 0b010, 0b101), offset=0),
        Run(0, 3, 5, length=4),
        Run(1, 5, 6, length=0, words=(0b1001,), offset=3),
    ]
    results = []
    for compiled in (True, False):
        cache = SlotCache(
            layers=1,
            slots=3,
            kv_heads=2,
            rows=64,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        cache.data.normal_(generator=torch.Generator().manual_seed(0))
        rows = replace(DraftRows.of(cache, runs, [0] * 6, [0] * 6), compiled=compiled)
        query, key, value = (
            torch.randn(6, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
        )
        for window in (None, 4):
            results.append(rows.attend(0, query, key, value, scale=0.25, window=window))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_greedy_sequences_of_a_batch_are_ranked_as_alone(tiny_target: Target) -> None:
    drafter = EagleDrafter(HEADS["eagle3"](tiny_target), slots=2)  # type: ignore[arg-type]
    texts = [Text.random(random.Random(i), tiny_target, "aux", 8) for i in (0, 0)]
    for slot, params in enumerate((SamplingParams(), SAMPLED)):
        drafter.start(slot, texts[slot].ids[:1], params)
    extend(drafter, [0, 1], texts, [8, 8])
    greedy, sampled = drafter.propose([0, 1], [PLAN, PLAN])
    assert drafter.propose([0], [PLAN]) == [greedy]
    assert sampled != greedy
