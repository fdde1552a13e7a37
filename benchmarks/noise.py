"""What the target's noise is worth to a drafter that ranks by log q + s * noise.

    python -m benchmarks.noise --head runs/larger/head --features runs/larger/features

Answers prompts of rows that the head's training held out, at each temperature, and looks at the pool of every
node whose children were ranked and whose place the output went through: how often the token that the target
drew there is among the k best for a strength s, below the root and deeper. One run serves all strengths, as
the output does not depend on what is drafted; that deeper nodes were reached at all does, a little. Counts
only, so the numbers are the same on any machine. Printed too are the strengths that were fitted on the way,
and what the calibrated chances of the candidates said against how often they came true.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stages.artifacts import open_artifact
from stages.decoding import EagleModel
from stages.decoding.drafters import EagleDrafter
from stages.decoding.drafters.growing import GrowingDrafter
from stages.decoding.drafters.ranking import Node
from stages.decoding.drafters.strength import Pool
from stages.decoding.growth import TreeGrowth
from stages.features.source import OfflineFeatures
from stages.train.config import TrainConfig
from stages.train.stage import choose_rows

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
BEST = (1, 2, 4, 8)
LEVELS = ("root", "deeper")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--features", required=True, help="that the head was trained on")
    parser.add_argument("--tree", default="chain:depth=3", help="a fixed one, so that runs are alike")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    prompts = held_out_prompts(options.head, options.features, options.num_prompts)
    for temperature in options.temperatures:
        # A model of its own: what was learned at another temperature is not taken along.
        model = EagleModel.from_pretrained(options.target, options.head, tree=options.tree)
        watch = Watch(model)
        for seed, prompt in enumerate(prompts):
            model.generate(prompt, max_new_tokens=options.new_tokens, temperature=temperature, seed=seed)
        watch.show(temperature)


def held_out_prompts(head: str, features: str, count: int) -> list[list[int]]:
    """Token ids up to the first answer of rows that the head was not trained on."""
    config = open_artifact(head, "head").manifest.config
    source = OfflineFeatures(open_artifact(features, "features"))
    asked = TrainConfig(features=[features], output=head, holdout=config["holdout"], seed=config["seed"])
    _, held_out = choose_rows(source, asked)
    prompts = []
    for row in held_out[:count]:
        with source.open(row.shard) as rows:
            taken = rows[row.row]
            prompts.append(taken.input_ids[: int(taken.supervised[0]) + 1].tolist())
    return prompts


class Watch:
    """Counts at every node that the output passes, as the drafter learns of it."""

    def __init__(self, model: EagleModel) -> None:
        drafter = model.engine.drafter
        assert isinstance(drafter, GrowingDrafter), "heads and draft models rank with noise"
        if isinstance(drafter, EagleDrafter):
            drafter.one_op = False  # that op learns by itself
        self._ranking = drafter.ranking
        self._learn = drafter.ranking.learn
        self._among: dict[tuple[str, float, int], int] = defaultdict(int)
        self._seen: dict[str, int] = defaultdict(int)
        self._chances: dict[int, list[tuple[float, float, bool]]] = defaultdict(list)
        self._calibrations = drafter.calibrations
        drafter.ranking.learn = self._watched  # type: ignore[method-assign]

    def _watched(
        self, temperature: float, growth: TreeGrowth, nodes: Mapping[int, Node], truth: Sequence[int]
    ) -> None:
        for outcome in growth.outcomes(truth):
            said = self._calibrations.at(temperature).probability(outcome.depth, outcome.stated)
            self._chances[outcome.depth].append((outcome.stated, said, outcome.hit))
        for candidate, token in zip(growth.path(truth), truth, strict=False):
            node = nodes.get(candidate)
            if node is not None and node.pool is not None:
                self._count(node.pool, token)
        self._learn(temperature, growth, nodes, truth)

    def _count(self, pool: Pool, token: int) -> None:
        level = LEVELS[pool.depth > 1]
        self._seen[level] += 1
        for strength in STRENGTHS:
            order = (pool.log_probs + strength * pool.noise).topk(max(BEST)).indices
            best = pool.ids[order].tolist()
            for k in BEST:
                self._among[level, strength, k] += token in best[:k]

    def show(self, temperature: float) -> None:
        for level in LEVELS:
            print(f"\ntemperature {temperature:g}, {level}: {self._seen[level]:,} draws")
            print(f"{'strength':>9}" + "".join(f"{f'k={k}':>8}" for k in BEST))
            for strength in STRENGTHS:
                shares = [self._among[level, strength, k] / max(self._seen[level], 1) for k in BEST]
                print(f"{strength:9.2f}" + "".join(f"{share:8.1%}" for share in shares))
        for depth in sorted(self._chances):
            fitted = self._ranking.strength.at(temperature, depth)
            stated, said, hits = zip(*self._chances[depth], strict=True)
            count = len(hits)
            print(
                f"depth {depth}: strength fitted {fitted:g}; {count:,} candidates stated at "
                f"{sum(stated) / count:.3f}, expected at {sum(said) / count:.3f}, "
                f"accepted {sum(hits) / count:.3f}"
            )


if __name__ == "__main__":
    main()
