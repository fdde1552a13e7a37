"""Tree settings and growth: pure, without a model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoding.tree import DraftTree, TreeConfig, TreeGrowth
from stages.errors import EagleError


def test_a_trees_text_reads_back_as_the_same_tree() -> None:
    for text in (
        "none",
        "chain:depth=3",
        "dynamic",
        "dynamic:depth=2,width=3,nodes=6,min_prob=0.1,expand_prob=0.2",
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
    ],
)
def test_a_wrong_tree_text_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(EagleError, match=complaint):
        TreeConfig.parse(text)


@st.composite
def growths(draw: st.DrawFn) -> tuple[TreeConfig, TreeGrowth]:
    config = TreeConfig(
        depth=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 4)),
        nodes=draw(st.integers(1, 12)),
        min_prob=draw(st.sampled_from([0.0, 0.1])),
        expand_prob=0.0,
    )
    growth = TreeGrowth(config, root=7, depth=config.depth)
    scores = st.lists(st.sampled_from([-0.1, -0.5, -1.0, -3.0]), min_size=config.width, max_size=config.width)
    frontier = [-1]
    while frontier:
        for parent in frontier:
            growth.add_children(parent, list(range(config.width)), sorted(draw(scores), reverse=True))
        frontier = growth.frontier()
    return config, growth


@settings(max_examples=200, deadline=None)
@given(growths())
def test_the_grown_tree_is_connected_parents_first_and_within_its_limits(
    grown: tuple[TreeConfig, TreeGrowth],
) -> None:
    config, growth = grown
    tree = growth.tree()
    assert tree.tokens[0] == 7
    assert tree.parents[0] == -1
    assert tree.drafted <= config.nodes
    for i in range(1, len(tree.tokens)):
        assert 0 <= tree.parents[i] < i
        assert tree.depths[i] == tree.depths[tree.parents[i]] + 1 <= config.depth
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)


@settings(max_examples=200, deadline=None)
@given(growths())
def test_the_grown_tree_holds_the_most_probable_candidates(grown: tuple[TreeConfig, TreeGrowth]) -> None:
    config, growth = grown
    floor = math.log(config.min_prob) if config.min_prob else -math.inf
    best = sorted((s for s in growth._scores if s >= floor), reverse=True)[: config.nodes]
    assert growth.tree().drafted == len(best)
    assert sorted((growth._scores[i] for i in growth._best()), reverse=True) == best


def test_no_level_is_drafted_that_cannot_reach_the_tree() -> None:
    growth = TreeGrowth(TreeConfig(nodes=1, width=2, min_prob=0.0, expand_prob=0.0), root=0, depth=5)
    growth.add_children(-1, [1, 2], [-0.1, -2.0])
    assert growth.frontier() == [0]  # the second child can never be among the best one
    growth = TreeGrowth(TreeConfig(expand_prob=0.5), root=0, depth=5)
    growth.add_children(-1, [1, 2], [math.log(0.4), math.log(0.3)])
    assert growth.frontier() == []


def test_ancestor_words_hold_each_nodes_path() -> None:
    tree = DraftTree(tokens=(9, 1, 2, 3, 4), parents=(-1, 0, 0, 1, 3), depths=(0, 1, 1, 2, 3))
    assert tree.ancestors() == [0b1, 0b11, 0b101, 0b1011, 0b11011]
    chain = DraftTree(tuple(range(64)), (-1, *range(63)), tuple(range(64)))
    assert chain.ancestors()[-1] == -1


def test_settings_out_of_range_are_refused_however_they_are_given() -> None:
    with pytest.raises(EagleError, match="nodes 1 to 63"):
        TreeConfig(nodes=100)
    with pytest.raises(EagleError, match="at most 64 nodes can be expanded"):
        TreeConfig(width=16, depth=8)
