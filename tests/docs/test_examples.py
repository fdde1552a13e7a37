"""The batch scripts submit commands that eagle takes, in an order in which each finds what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle_cli.catalog import STAGES
from eagle_cli.main import stage_command

ROOT = Path(__file__).parents[2]
EAGLE = """#!{python}
import json, os, sys
open(os.environ['SEEN'], 'a').write(json.dumps(sys.argv[1:]) + '\\n')
"""
SBATCH = """#!/usr/bin/env bash
# Runs a job at once, every part of an array in turn, with the shell that Slurm gives to --wrap.
parts=-
while (($#)); do
    case $1 in
        --array) parts=$(seq ${2%-*} ${2#*-}); shift 2 ;;
        --wrap) job=$2; shift 2 ;;
        --dependency) echo "$2" >>"$SEEN.waits"; shift 2 ;;
        *) shift ;;
    esac
done
for part in $parts; do SLURM_ARRAY_TASK_ID=$part sh -c "$job" || exit; done
echo "$(wc -l <"$SEEN");cluster"
"""


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values that eagle reads from its arguments, those that were given."""
    stage = next(each for each in STAGES if each.name == arguments[0])
    context = stage_command(stage).make_context(stage.name, arguments[1:])
    given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
    return {name: context.params[name] for name in given} | {"stage": stage.name}


def test_slurm_runs_the_stages_in_order_with_the_flags_as_they_were_quoted(tmp_path: Path) -> None:
    for name, text in (("eagle", EAGLE.format(python=sys.executable)), ("sbatch", SBATCH)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    seen = tmp_path / "seen"
    own = {
        "TARGET": "my models/t",
        "RUN": "gs://b/r",
        "PROMPTS": "chats/*.parquet builtin:chat",
        "PARTS": "2",
    }
    own |= {"GEN_DATA_FLAGS": "--system-prompt 'Be brief; please.'", "EXTRACT_FEATURES_FLAGS": "--last all"}
    own |= {
        "TRAIN_FLAGS": "--epochs 1",
        "BENCH_FLAGS": "--temperature 0,1",
        "EVAL_PROMPTS": "a.jsonl b.jsonl",
    }
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", ROOT / "examples/slurm.sh"],
        env=os.environ | own | {"PATH": path, "SEEN": str(seen)},
        check=True,
    )
    runs = [parsed(json.loads(line)) for line in seen.read_text().splitlines()]
    data = {"stage": "gen-data", "target": "my models/t", "output": "gs://b/r/conversations", "num_shards": 2}
    data |= {"prompts": ["chats/*.parquet", "builtin:chat"], "system_prompt": "Be brief; please."}
    features = {"stage": "extract-features", "target": "my models/t", "conversations": data["output"]}
    features |= {"output": "gs://b/r/features", "last": "all", "num_shards": 2}
    assert runs == [
        *({**data, "shard_index": part} for part in range(2)),
        data,
        *({**features, "shard_index": part} for part in range(2)),
        features,
        {"stage": "train", "features": ["gs://b/r/features"], "output": "gs://b/r/head", "epochs": 1},
        {"stage": "bench", "target": "my models/t", "head": ["gs://b/r/head"], "output": "gs://b/r/bench"}
        | {"prompts": ["a.jsonl", "b.jsonl"], "temperature": "0,1"},
    ]
    assert (tmp_path / "seen.waits").read_text().split() == [f"afterok:{n}" for n in (2, 3, 5, 6, 7)]
