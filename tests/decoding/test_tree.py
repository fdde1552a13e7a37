"""Tree settings and growth: pure, without a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoding.growth import TreeGrowth, frontiers, grow, trees
from stages.decoding.tree import DraftTree, Prices, TreeConfig, TreePlan
from stages.errors import EagleError

Scores = Callable[[], list[float]]


def test_a_trees_text_reads_back_as_the_same_tree() -> None:
    for text in (
        "none",
        "chain:depth=3",
        "dynamic",
        "dynamic:depth=2,width=3,nodes=6,min_prob=0.1,expand_prob=0.2",
        "static:0,1,0.0,0.1,0.0.2",
        "best:depth=4,nodes=9",
        "cost",
        "cost:nodes=7",
    ):
        config = TreeConfig.parse(text)
        assert TreeConfig.parse(str(config)) == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bush", "unknown tree 'bush'"),
        ("dynamic:depht=3", "unknown tree setting 'depht'"),
        ("chain:depth=x", "not a number"),
        ("dynamic:nodes=64", "nodes 1 to 63"),
        ("dynamic:depth=0", "at least 1"),
        ("dynamic:min_prob=1", r"lie in \[0, 1\)"),
        ("dynamic:width=40,depth=5", "at most 64 nodes can be expanded"),
        ("chain:width=2", "a chain tree has no setting width"),
        ("none:depth=2", "a none tree has no setting depth"),
        ("cost:min_prob=0.1", "a cost tree has no setting min_prob"),
        ("static", "at least one rank"),
        ("static:0,0", "distinct paths"),
        ("static:0.1", "needs its beginning 0 too"),
        ("static:a.b", "ranks joined by dots"),
        ("static:" + ",".join(map(str, range(64))), "at most 63"),
    ],
)
def test_a_wrong_tree_text_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(EagleError, match=complaint):
        TreeConfig.parse(text)


def test_settings_out_of_range_are_refused_however_they_are_given() -> None:
    with pytest.raises(EagleError, match="nodes 1 to 63"):
        TreeConfig(nodes=100)
    with pytest.raises(EagleError, match="at most 64 nodes can be expanded"):
        TreeConfig(width=16, depth=8)


def test_a_plan_is_no_deeper_than_the_output_has_room_for() -> None:
    config = TreeConfig.parse("static:0,1,0.0,0.0.0")
    assert config.plan(9).depth == 3
    assert config.plan(2).paths == ((0,), (1,), (0, 0))
    assert config.plan(0).kind == "none"
    assert TreeConfig.parse("none").plan(5).kind == "none"


def grown(plan: TreePlan, scores: Scores) -> TreeGrowth:
    """A tree whose nodes have children 0, 1, ... with the scores drawn."""
    growth = TreeGrowth(plan, root=7)
    grow([growth], lambda b, candidate: (list(range(plan.width)), sorted(scores(), reverse=True)))
    return growth


@st.composite
def growths(draw: st.DrawFn) -> TreeGrowth:
    """Scores are few, so that there are ties."""
    plan = TreePlan(
        draw(st.sampled_from(["dynamic", "best", "chain"])),
        depth=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 4)),
        nodes=draw(st.integers(1, 12)),
        min_prob=draw(st.sampled_from([0.0, 0.1])),
    )
    one = st.lists(st.sampled_from([-0.1, -0.5, -1.0, -3.0]), min_size=plan.width, max_size=plan.width)
    return grown(plan, lambda: draw(one))


def require_connected(tree: DraftTree, plan: TreePlan) -> None:
    assert tree.tokens[0] == 7
    assert tree.parents[0] == -1
    assert tree.drafted <= plan.nodes
    for i in range(1, len(tree.tokens)):
        assert 0 <= tree.parents[i] < i
        assert tree.depths[i] == tree.depths[tree.parents[i]] + 1 <= plan.depth
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)


@settings(max_examples=100, deadline=None)
@given(growths())
def test_the_grown_tree_is_connected_parents_first_and_within_its_limits(growth: TreeGrowth) -> None:
    require_connected(growth.tree(), growth.plan)


@settings(max_examples=100, deadline=None)
@given(growths())
def test_the_grown_tree_holds_the_most_probable_candidates(growth: TreeGrowth) -> None:
    floor = math.log(growth.plan.min_prob) if growth.plan.min_prob else -math.inf
    scores = [growth.score(i) for i in range(growth.candidates)]
    best = sorted((s for s in scores if s >= floor), reverse=True)[: growth.plan.nodes]
    assert growth.tree().drafted == len(best)
    assert sorted((growth.score(i) for i in growth._best()), reverse=True) == best


def test_best_first_spends_its_passes_on_the_most_probable_nodes_of_any_level() -> None:
    """With one node a pass: the sure path goes deep before the doubtful sibling is looked at."""
    asked: list[int] = []
    growth = TreeGrowth(TreePlan("best", depth=4, width=1, nodes=6), root=0)

    def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
        asked.append(candidate)
        return [1, 2], [math.log(0.8), math.log(0.15)]

    grow([growth], children)
    depths = [growth.depth(i) if i >= 0 else 0 for i in asked]
    assert depths[:4] == [0, 1, 2, 3]
    assert growth.tree().drafted == 6


def test_a_static_tree_has_exactly_its_paths_and_no_more_passes_than_it_needs() -> None:
    plan = TreeConfig.parse("static:0,1,2,0.0,0.1,2.0,0.0.0").plan(9)
    asked: list[int] = []
    growth = TreeGrowth(plan, root=0)

    def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
        asked.append(candidate)
        return [10, 11, 12], [-0.5, -1.5, -2.5]

    grow([growth], children)
    tree = growth.tree()
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3)
    assert tree.tokens == (0, 10, 11, 12, 10, 11, 10, 10)
    assert [tree.parents[i] for i in range(4, 8)] == [1, 1, 3, 4]
    assert len(asked) == 4  # the root, 0, 2 and 0.0


def test_no_level_is_drafted_that_cannot_reach_the_tree() -> None:
    growth = TreeGrowth(TreePlan("dynamic", depth=5, width=2, nodes=1), root=0)
    growth.add_children(-1, [1, 2], [-0.1, -2.0])
    assert growth.frontier() == [0]  # the second child can never be among the best one
    growth = TreeGrowth(TreePlan("dynamic", depth=5, width=4, nodes=12, expand_prob=0.5), root=0)
    growth.add_children(-1, [1, 2], [math.log(0.4), math.log(0.3)])
    assert growth.frontier() == []


def test_no_more_nodes_are_expanded_than_ancestor_words_have_bits() -> None:
    growth = grown(TreePlan("best", depth=63, width=8, nodes=63), lambda: [-0.01 * i for i in range(8)])
    assert growth.capacity >= 0
    assert growth.tree().drafted == 63


def test_ancestor_words_hold_each_nodes_path() -> None:
    tree = DraftTree(tokens=(9, 1, 2, 3, 4), parents=(-1, 0, 0, 1, 3), depths=(0, 1, 1, 2, 3))
    assert tree.ancestors() == [0b1, 0b11, 0b101, 0b1011, 0b11011]
    chain = DraftTree(tuple(range(64)), (-1, *range(63)), tuple(range(64)))
    assert chain.ancestors()[-1] == -1


def test_outcomes_follow_the_output_as_far_as_it_was_drafted() -> None:
    growth = TreeGrowth(TreePlan("dynamic", depth=3, width=2, nodes=6), root=0)
    growth.add_children(-1, [1, 2], [math.log(0.6), math.log(0.3)])
    growth.add_children(1, [3, 4], [math.log(0.5), math.log(0.25)])  # below token 2
    found = growth.outcomes([2, 9, 5])
    assert [(o.depth, round(o.stated, 2), o.rank, o.hit) for o in found] == [
        (1, 0.6, 0, False),
        (1, 0.3, 1, True),
        (2, 0.5, 0, False),
        (2, 0.25, 1, False),
    ]
    assert found[2].parent == pytest.approx(0.3)
    assert growth.path([2, 9, 5]) == [-1, 1]


# Trees with prices.


@st.composite
def priced(draw: st.DrawFn) -> tuple[list[TreeGrowth], Prices]:
    """A batch of one to three trees; the prices rise by steps of any size."""
    count = draw(st.integers(1, 3))
    steps = draw(st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.6]), min_size=4 * count, max_size=4 * count))
    rows = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=2 * count, max_size=2 * count))
    prices = Prices((0.0, *itertools.accumulate(steps)), (0.0, *itertools.accumulate(rows)))
    plan = TreePlan("cost", depth=3, width=2, nodes=4, prices=prices)
    batch = [TreeGrowth(plan, root=7) for _ in range(count)]
    one = st.sampled_from([0.9, 0.6, 0.3, 0.05])

    def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
        first = draw(one)
        return [0, 1], [math.log(first), math.log((1 - first) / 2)]

    grow(batch, children)
    return batch, prices


@settings(max_examples=80, deadline=None)
@given(priced())
def test_the_nodes_kept_over_a_batch_are_those_that_gain_most(case: tuple[list[TreeGrowth], Prices]) -> None:
    batch, prices = case
    kept = trees(batch)
    for tree, growth in zip(kept, batch, strict=True):
        require_connected(tree, growth.plan)
    gained = sum(_chances(tree, growth) for tree, growth in zip(kept, batch, strict=True))
    gained -= prices.nodes[sum(tree.drafted for tree in kept)]
    # No choice of how many to keep in each tree does better; in each, the most probable are best.
    best = [
        sorted((math.exp(growth.score(i)) for i in range(growth.candidates)), reverse=True)[:4]
        for growth in batch
    ]
    for counts in itertools.product(*(range(len(chances) + 1) for chances in best)):
        other = sum(sum(chances[:n]) for chances, n in zip(best, counts, strict=True))
        assert gained >= other - prices.nodes[sum(counts)] - 1e-9


def _chances(tree: DraftTree, growth: TreeGrowth) -> float:
    """Summed chances of a tree's nodes, found again among the candidates."""
    place = {0: -1}
    total = 0.0
    for node in range(1, len(tree.tokens)):
        parent = place[tree.parents[node]]
        place[node] = next(
            i
            for i in range(growth.candidates)
            if growth.parent(i) == parent and growth.token(i) == tree.tokens[node]
        )
        total += math.exp(growth.score(place[node]))
    return total


@pytest.mark.parametrize(("level", "deep"), [(0.05, True), (0.9, False)])
def test_a_level_is_drafted_only_if_it_is_expected_to_pay(level: float, deep: bool) -> None:
    prices = Prices((0.0, *(0.1 * k for k in range(1, 16))), (0.0, *(level * r for r in range(1, 5))))
    growth = TreeGrowth(TreePlan("cost", depth=8, width=4, nodes=15, prices=prices), root=0)
    growth.add_children(-1, [1, 2], [math.log(0.7), math.log(0.1)])
    assert frontiers([growth]) == ([[0]] if deep else [[]])


def test_a_sure_tree_goes_deep_and_an_unsure_one_stops_at_once() -> None:
    prices = Prices((0.0, *(0.12 * k for k in range(1, 16))), (0.0, *(0.1 + 0.02 * r for r in range(4))))
    depths = []
    for chance in (0.95, 0.5, 0.1):
        growth = TreeGrowth(TreePlan("cost", depth=8, width=4, nodes=15, prices=prices), root=0)
        scores = [math.log(chance), math.log(0.05)]
        grow([growth], lambda b, candidate, scores=scores: ([1, 2], scores))
        depths.append(max(trees([growth])[0].depths))
    assert depths[0] == 8
    assert 0 < depths[1] < 8
    assert depths[2] == 0


def test_a_drafter_that_knows_all_levels_at_once_pays_for_no_passes() -> None:
    prices = Prices(tuple(0.02 * k for k in range(16)), tuple(0.7 * r for r in range(5)))
    plan = TreePlan("cost", depth=5, width=1, nodes=15, prices=prices)
    known, paying = TreeGrowth(plan, root=0), TreeGrowth(plan, root=0)
    grow([known], lambda b, candidate: ([7], [math.log(0.8)]))
    assert max(trees([known])[0].depths) == 5
    paying.add_children(-1, [7], [math.log(0.8)])
    assert frontiers([paying]) == [[]]
