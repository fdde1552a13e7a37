"""Draft heads trained in different ways on the same features, and what each is worth on held-out rows.

    python -m benchmarks.recipes --features runs/larger/features --conversations runs/larger/conversations \\
        --output runs/recipes 'adamw: --optimizer adamw' 'muon: --optimizer muon --epochs 2'

Each variant is `eagle train` with these flags, in a folder of its name below --output; one that is there
already is not trained again. Then every head is measured on the same held-out conversations, those of each
prompt source apart, and a table is printed. All variants must hold out the same rows: the same --seed and
--holdout.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from stages.artifacts import open_artifact
from stages.artifacts.conversations import read_conversations
from stages.features.index import RowIndex
from stages.features.joined import offline_features, place_of
from stages.features.source import FeatureSource
from stages.heads import load_head
from stages.train.acceptance import Acceptance, format_rates
from stages.train.config import TrainConfig
from stages.train.data import split_batches
from stages.train.ranks import Ranks
from stages.train.reading import HeldOutRows
from stages.train.stage import choose_rows
from stages.train.training import make_training

BATCH_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", help="'name: flags of eagle train'")
    parser.add_argument("--features", required=True, action="append", help="may be given several times")
    parser.add_argument(
        "--conversations",
        required=True,
        action="append",
        help="that the features were made of, in this order",
    )
    parser.add_argument("--output", required=True, help="folder for the heads")
    parser.add_argument("--steps", type=int, default=3, help="draft steps to measure")
    options = parser.parse_args()
    sources = [
        [conversation.source for conversation in read_conversations(open_artifact(uri, "conversations"))]
        for uri in options.conversations
    ]
    lines = []
    for variant in options.variants:
        name, _, flags = (part.strip() for part in variant.partition(":"))
        output = Path(options.output) / name
        given = [part for uri in options.features for part in ("--features", uri)]
        arguments = [*given, "--output", str(output), *shlex.split(flags)]
        subprocess.run([sys.executable, "-m", "eagle_cli", "train", *arguments], check=True)
        artifact = open_artifact(str(output), "head")
        config = TrainConfig.model_validate(
            artifact.manifest.config | {"features": options.features, "output": "-"}
        )
        found = {
            source: measure(config, output, rows, options.steps)
            for source, rows in by_source(config, sources).items()
        }
        total = sum(found.values(), Acceptance.none(options.steps))
        last = json.loads(artifact.read("metrics.jsonl").splitlines()[-1])
        cells = [name, f"{artifact.manifest.counts['train_tokens']:,}", f"{last['seconds']:.0f}"]
        cells += [described(acceptance) for acceptance in (*found.values(), total)]
        lines.append("| " + " | ".join(cells) + " |")
    titles = ["", "response tokens seen", "seconds", *(Path(source).stem for source in found), "all"]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    print("\n".join(lines))


def by_source(config: TrainConfig, sources: Sequence[Sequence[str]]) -> dict[str, list[RowIndex]]:
    """The rows that this configuration holds out, by the source of their prompts."""
    _, held_out = choose_rows(_features(config), config)
    found: dict[str, list[RowIndex]] = {}
    for row in held_out:
        place, number = place_of(row.row_id)
        found.setdefault(sources[place][number], []).append(row)
    return dict(sorted(found.items()))


def measure(config: TrainConfig, head: Path, rows: Sequence[RowIndex], steps: int) -> Acceptance:
    """What a head artifact is worth on these rows."""
    features = _features(config)
    batches = HeldOutRows(split_batches(rows, BATCH_TOKENS))
    loaded = load_head(open_artifact(str(head), "head"), dtype=torch.float32, device="cpu")
    training = make_training(config, features, loaded, 1, Ranks())
    return training.evaluate(batches.batches(features), steps)


def described(acceptance: Acceptance) -> str:
    return f"{format_rates(acceptance.rates)}, {acceptance.tokens_per_step:.2f}"


def _features(config: TrainConfig) -> FeatureSource:
    return offline_features([open_artifact(uri, "features", config.verify) for uri in config.features])


if __name__ == "__main__":
    main()
