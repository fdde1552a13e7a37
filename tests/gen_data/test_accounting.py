"""Every row that is read has one outcome, and parts make what one run makes, whatever is in the sources."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.artifacts import open_artifact
from stages.artifacts.conversations import read_conversations
from stages.errors import EagleError
from stages.gen_data.config import GenDataConfig
from stages.gen_data.stage import run
from stages.progress import Reporter
from tests.tiny import make_tiny_target, write_jsonl

QUIET = Reporter(quiet=True)
BENCHMARK = "How many loaves does a baker sell in eight hours at twelve an hour?"
GOOD = st.builds(
    lambda i, turns: {"id": f"{i}", "turns": [f"question {i}", "and then?", "why?"][:turns]},
    st.integers(0, 6),
    st.integers(1, 3),
)
SPECIAL = st.sampled_from(
    [
        {"prompt": "same"},
        {"prompt": "Same  "},
        {"prompt": " "},
        {"prompt": BENCHMARK},
        {"prompt": "long " * 300},
        {"prompt": "I am jane@example.com"},
        {"prompt": "key AKIAIOSFODNN7EXAMPLE and ghp_" + "a1B2" * 9},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "same"}]},
        {"id": "QWJhYvA_3", "conversations": [{"from": "human", "value": "go on"}]},
        {"x": 1},
        ["no object"],
        '{"prompt": "half a line',
    ]
)
ROWS = st.lists(GOOD | SPECIAL, min_size=1, max_size=9)
SETTINGS = st.fixed_dictionaries(
    {
        "near_duplicates": st.sampled_from([1, 0.8]),
        "max_prompts": st.sampled_from([None, None, 1, 4]),
        "answers_per_prompt": st.sampled_from([1, 1, 2]),
        "drop_truncated": st.booleans(),
        "max_model_len": st.sampled_from([None, 70]),
        "shard_rows": st.integers(1, 3),
        "shuffle_buffer": st.sampled_from([0, 3]),
        "pii": st.sampled_from(["off", "off", "redact", "drop"]),
        "seed": st.integers(0, 2),
    }
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target"))


def write_source(path: Path, rows: list) -> str:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return str(path)


def made(config: GenDataConfig) -> tuple[dict, list]:
    artifact = open_artifact(run(config, QUIET).output, "conversations")
    return artifact.manifest.counts, list(read_conversations(artifact))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ROWS, second=ROWS, weighted=st.booleans(), changes=SETTINGS, order=st.permutations(range(3)))
def test_rows_add_up_and_parts_are_one_run(target, tmp_path_factory, first, second, weighted, changes, order):
    folder = tmp_path_factory.mktemp("run")
    sources = [write_source(folder / "a.jsonl", first), write_source(folder / "b.jsonl.gz", second)]
    config = GenDataConfig(
        target=str(target),
        prompts=[f"{source}={i + 1}" for i, source in enumerate(sources)] if weighted else sources,
        output=str(folder / "whole"),
        exclude=[str(write_jsonl(folder / "benchmark.jsonl", [{"prompt": BENCHMARK}]))],
        max_reject_rate=1,
        max_new_tokens=8,
        temperature=0.8,
        batch_size=4,
        dtype="float32",
        device="cpu",
        **changes,
    )
    try:
        counts, rows = made(config)
    except EagleError as error:
        if not str(error).startswith(("none of ", "no prompt came ")):
            raise
        return
    assert counts["rows"] == len(rows) == len({row.id for row in rows})
    assert counts["response_tokens"] == sum(sum(row.loss_mask) for row in rows)
    kept = Counter(source for source, _ in {(row.source, row.id.split("@")[0].split("#")[0]) for row in rows})
    for source, written in zip(sources, (first, second), strict=True):
        tally = dict(counts["sources"].get(source, {"read": 0}))
        read = tally.pop("read")
        assert read == sum(tally.values()) <= len(written)
        assert min(tally.values(), default=1) > 0 or tally.get("kept") == 0
        assert tally.get("kept", 0) == kept[source]
        if changes["max_prompts"] is None:
            assert read == len(written)
            assert tally.get("bad_json", 0) == sum(isinstance(row, str) for row in written)
            assert "not_needed" not in tally
    parts = config.model_copy(update={"output": str(folder / "parts"), "num_shards": 3})
    for index in order:
        run(parts.model_copy(update={"shard_index": index}), QUIET)
    assert made(parts) == (counts, rows)
