"""The walk down a draft tree by what the target has drawn at its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from stages.decoding.tree import DraftTree


def walk(tree: DraftTree, drawn: Sequence[int]) -> tuple[list[int], int]:
    """The accepted path, the root first, and what the target drew behind it."""
    path = [0]
    while True:
        at = path[-1]
        for node in range(at + 1, len(tree.tokens)):  # children stand behind their parents
            if tree.parents[node] == at and tree.tokens[node] == drawn[at]:
                path.append(node)
                break
        else:
            return path, drawn[at]


def padded_tree(tree: DraftTree, size: int) -> DraftTree:
    """With children of the root added up to ``size`` nodes, which nothing looks at."""
    more = size - len(tree.tokens)
    return DraftTree(tree.tokens + (0,) * more, tree.parents + (0,) * more, tree.depths + (1,) * more)


def until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the output, that one included."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: i + 1]
    return tokens
