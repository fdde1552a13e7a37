"""Trees grown in one shape against the host's, and the cut of what was accepted."""

from __future__ import annotations

import itertools
import math
import random

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels import Filters
from kernels.accept import Acceptance
from stages.decoding.device.cycle import cut
from stages.decoding.device.growth import Frontier, Growth, Trees
from stages.decoding.device.state import Rows
from stages.decoding.growth import TreeGrowth, grow, trees
from stages.decoding.tree import DraftTree, TreeConfig
from stages.decoding.walk import until_end, walk


class World:
    """What follows each path: the same for whoever asks; of ``steps`` different probabilities, so that there
    are ties."""

    def __init__(self, seed: int, width: int, steps: int) -> None:
        self.seed, self.width, self.steps = seed, width, steps

    def children(self, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        source = random.Random(f"{self.seed} {path}")
        tokens = source.sample(range(1000), self.width)
        chances = sorted((source.randint(1, self.steps) / (self.steps + 1) for _ in tokens), reverse=True)
        return tokens, [math.log(chance) for chance in chances]


def hosts_tree(world: World, tree: TreeConfig) -> tuple[DraftTree, bool]:
    """The tree, and whether rounding decides about it, of two paths that are equally probable but for that:
    the host multiplies chances, and the device adds logarithms."""
    growth = TreeGrowth(tree.plan(tree.depth), root=7)

    def children(_: int, candidate: int) -> tuple[list[int], list[float]]:
        path: tuple[int, ...] = ()
        while candidate >= 0:
            path = (growth.token(candidate), *path)
            candidate = growth.parent(candidate)
        return world.children(path)

    grow([growth], children)
    reaches, sums = growth._reaches, list[float]()
    for i, stated in enumerate(growth._stated):
        sums.append((sums[growth.parent(i)] if growth.parent(i) >= 0 else 0.0) + math.log(stated))
    ordered = sorted(zip(reaches, sums, strict=True))
    near = [(a, b) for a, b in itertools.pairwise(ordered) if b[0] - a[0] < 1e-9 * b[0]]
    return trees([growth])[0], any(a != b for a, b in near)


def devices_trees(worlds: list[World], tree: TreeConfig) -> Trees:
    growth, batch = Growth(tree), len(worlds)
    paths: list[dict[int, tuple[int, ...]]] = [{-1: ()} for _ in worlds]
    known = [0] * batch

    def add(front: Frontier | None, numbers: list[list[int]], scores: list[list[float]]) -> None:
        tokens, found = [], []
        for b, world in enumerate(worlds):
            tokens.append([])
            found.append([])
            for number, score in zip(numbers[b], scores[b], strict=True):
                ids, log_probs = world.children(paths[b][number])
                for token in ids:
                    paths[b][known[b]] = (*paths[b][number], token)
                    known[b] += 1
                tokens[b].append(ids)
                # As the host adds them up, to the last digit.
                found[b].append([score + math.log(math.exp(log_prob)) for log_prob in log_probs])
        growth.add(front, torch.tensor(tokens), torch.tensor(found, dtype=torch.float64))

    add(None, [[-1]] * batch, [[0.0]] * batch)
    for _ in range(1, tree.depth):
        front = growth.frontier()
        add(front, front.numbers.tolist(), front.scores.tolist())
    return growth.trees(torch.full((batch,), 7))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([2, 5, 1000]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.2, 0.6]),
)
def test_a_tree_grown_in_one_shape_is_the_hosts(seeds, depth, width, nodes, steps, min_prob, expand_prob):
    tree = TreeConfig("dynamic", depth, width, nodes, min_prob, expand_prob)
    found = devices_trees([World(seed, width, steps) for seed in seeds], tree)
    for b, seed in enumerate(seeds):
        wanted, by_rounding = hosts_tree(World(seed, width, steps), tree)
        assume(not by_rounding)
        size = len(wanted.tokens)
        assert tuple(found.tokens[b, :size].tolist()) == wanted.tokens
        assert tuple(found.parents[b, :size].tolist()) == wanted.parents
        assert tuple(found.depths[b, :size].tolist()) == wanted.depths
        assert found.words[b, :size].tolist() == wanted.ancestors()
        assert int(found.drafted[b]) == wanted.drafted
        padding = torch.arange(size, found.tokens.shape[1])
        assert (found.parents[b, size:] == -2).all()
        assert found.words[b, size:].tolist() == [1 | 1 << int(i) for i in padding]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 9))
def test_an_accepted_path_is_cut_as_the_host_cuts_it(source, nodes, left):
    parents = [-1] + [source.randrange(i) for i in range(1, nodes)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    # Children of one node differ.
    tokens = [3 * i + source.randint(0, 2) for i in range(nodes)]
    drawn = [source.choice([i for i, p in enumerate(parents) if p == n] or [0]) for n in range(nodes)]
    drawn = [tokens[i] if source.random() < 0.8 and i else 90 for i in drawn]
    ends = frozenset(source.sample([*tokens, 90], k=source.randint(0, 2)))
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths))
    path, bonus = walk(tree, drawn)
    wanted = until_end([tokens[n] for n in path[1:]] + [bonus], ends)[:left]

    columns = 1 + max(depths)
    rows = Rows(
        *(torch.tensor([value]) for value in (0, tokens[0], 50, left)),
        torch.tensor([True]),
        torch.tensor([[*ends, *[-1] * (4 - len(ends))]]),
        *(torch.zeros(1) for _ in range(3)),
        Filters(*(torch.zeros(1) for _ in range(3))),
    )
    accepted = Acceptance(
        torch.tensor([path + [-1] * (nodes - len(path))]),
        torch.tensor([len(path)]),
        torch.tensor([bonus]),
        torch.tensor([drawn]),
    )
    shaped = Trees(torch.tensor([tokens]), *(torch.zeros(1, nodes) for _ in range(3)), torch.zeros(1))
    moved = cut(rows, shaped, accepted, columns)
    emitted = int(moved.emitted)
    assert moved.tokens[0, :emitted].tolist() == wanted
    assert int(moved.accepted) == min(len(path) - 1, len(wanted))
    assert moved.path[0, :emitted].tolist() == path[:emitted]
