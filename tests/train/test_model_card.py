"""The README.md of a head."""

from __future__ import annotations

import json
import shlex

import yaml

from eagle_cli.catalog import STAGES
from stages.artifacts import Parent, TargetFingerprint
from stages.train.config import TrainConfig
from stages.train.model_card import model_card

COUNTS = {
    "head": "eagle3",
    "parameters": 8_849_664,
    "target_parameters": 134_515_008,
    "draft_vocab_size": 6528,
    "draft_vocab_coverage": 0.99,
    "train_rows": 1710,
    "train_tokens": 1_421_370,
    "steps": 1386,
    "holdout_rows": 90,
    "holdout": {"agreement": [0.64007, 0.59481, 0.55794], "tokens_per_step": 2.15043},
    "parity": {"rows": 8, "measured_tokens_per_step": 1.9688, "predicted_tokens_per_step": 1.9719},
}


def card(name: str, counts: dict | None = None, **settings: object) -> str:
    target = TargetFingerprint(
        name=name,
        config="c" * 64,
        tokenizer="d" * 64,
        chat_template="e" * 64,
        weights="f" * 64,
        dtype="bfloat16",
    )
    config = TrainConfig(**({"features": ["runs/a b/features"], "output": "runs/head"} | settings))
    parent = Parent(uri="runs/a b/features", kind="features", digest="a" * 64)
    return model_card(config, target, [parent], COUNTS | (counts or {}))


def code(text: str, program: str) -> list[str]:
    """The words of the command of that program in the card."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"    {program} ")]
    return shlex.split(line)


def test_the_hub_reads_the_target_and_the_kind_and_a_person_the_numbers() -> None:
    text = card("org/model", epochs=6)
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {"base_model": "org/model", "tags": ["speculative-decoding", "eagle3"]}
    for figure in (
        "64.0%, 59.5%, 55.8%",
        "2.15",
        "1.97, where 1.97 is predicted",
        "90 conversations",
        "8.8 M (6.6%",
    ):
        assert figure in body
    assert f"features `runs/a b/features`, digest `{'a' * 64}`" in body


def test_its_commands_can_be_typed() -> None:
    text = card("org/model", epochs=6, init="random", fc_norm=True, lr=0.002, device="cpu", overwrite=True)
    words = code(text, "eagle train")
    assert words[:4] == ["eagle", "train", "--features", "runs/a b/features"]
    assert set(words[4:]) == {
        "--fc-norm",
        "--epochs",
        "6",
        "--lr",
        "0.002",
        "--init",
        "random",
        "--output",
        "HEAD",
    }
    fields = next(stage for stage in STAGES if stage.name == "train").config_class().model_fields
    assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= set(fields)
    speculation = json.loads(code(text, "vllm serve")[-1])
    assert speculation == {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}


def test_a_built_in_target_is_no_model_of_the_hub_nor_of_other_engines() -> None:
    text = card("builtin:smollm2", {"holdout_rows": 0, "holdout": {}, "parity": {}})
    assert "base_model" not in text
    assert "vllm serve" not in text
    assert "held out" not in text
