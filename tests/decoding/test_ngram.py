"""Lookup over prompt and output."""

from __future__ import annotations

from stages.decoding import SamplingParams, TreeConfig
from stages.decoding.drafters import NgramDrafter
from stages.decoding.tree import DraftTree, TreePlan
from tests.decoding.test_drafters import PLAN


def looked_up(ids: list[int], plan: TreePlan, prompt: int = 1, least: int = 2, most: int = 4) -> DraftTree:
    drafter = NgramDrafter(least, most)
    drafter.start(0, ids[:prompt], SamplingParams())
    drafter.extend([0], None, [ids[1:]])
    return drafter.propose([0], [plan])[0]


def test_ngram_proposes_what_followed_the_longest_match() -> None:
    text = [1, 2, 3, 8, 8, 9, 2, 3, 7, 7, 1, 2, 3]
    assert looked_up(text, TreeConfig.parse("chain:depth=3").plan(9)).tokens == (3, 8, 8, 9)
    assert looked_up(text[6:], TreeConfig.parse("chain:depth=2").plan(9)).tokens == (3, 7, 7)


def test_ngram_branches_where_matches_go_apart_the_frequent_way_first() -> None:
    text = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 3, 7, 1, 2]
    tree = looked_up(
        text, TreeConfig.parse("dynamic:depth=2,width=3,nodes=8,min_prob=0,expand_prob=0").plan(9)
    )
    assert tree.tokens == (2, 3, 4, 7, 5, 6)
    assert tree.parents == (-1, 0, 0, 1, 1, 2)


def test_ngram_without_a_match_proposes_nothing() -> None:
    assert looked_up([1, 2, 3, 4], PLAN) == DraftTree.root_only(4)
    assert looked_up([1, 2, 1], PLAN) == DraftTree.root_only(1)  # one token is too short a match
    assert looked_up([1, 2, 1], PLAN, least=1).tokens[1] == 2
