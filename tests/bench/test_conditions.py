"""Claims about what may differ between the levels of a run: temperatures, trees, and how requests come."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from stages.artifacts import artifact_state, open_artifact
from stages.bench import stage
from stages.bench.config import BenchConfig
from stages.bench.endpoint import Endpoint
from stages.bench.load import Load, due_times, loads_of
from stages.bench.report import BenchReport
from stages.decoding import SamplingParams, engine
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets import Target
from tests.bench.test_endpoint import JOB, USAGE, chunk, small_server
from tests.bench.test_stage import TREE, lossy
from tests.tiny import write_jsonl

QUIET = Reporter(quiet=True)


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.integers(0, 2**64 - 1))
def test_requests_of_a_rate_come_in_order_and_the_last_when_it_is_due(
    count: int, rate: float, seed: int
) -> None:
    times = due_times(count, rate, (seed, 1))
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(count / rate)
    assert times == due_times(count, rate, (seed, 1))


def test_the_gaps_between_requests_are_those_of_a_poisson_process() -> None:
    times = due_times(20_000, 4.0, (0,))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.01)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)  # 1 / e
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.05)


def test_a_request_of_a_rate_is_sent_when_it_is_due_and_not_before() -> None:
    with small_server([chunk("a"), USAGE]) as url:
        jobs = [(number, JOB) for number in range(3)]
        turn = Endpoint("e", url).answer(jobs, 1, SamplingParams(), due=[0.0, 0.1, 0.4])
    assert turn.duration_s >= 0.4
    assert [sample.request for sample in turn.samples] == [0, 1, 2]
    assert all(0 < sample.ttft_s < turn.duration_s for sample in turn.samples)


def config(**fields: Any) -> BenchConfig:
    return BenchConfig(**({"target": "t", "head": ["h"], "prompts": ["p"], "output": "o"} | fields))


def test_lists_of_conditions_become_levels_each_once_and_in_order() -> None:
    both = config(temperature="1,0", request_rate="2,0.5,inf", concurrency="4")
    assert both.temperatures == (0.0, 1.0)
    assert loads_of(both) == [
        Load(4, rate, temperature) for temperature in (0.0, 1.0) for rate in (0.5, 2.0, None)
    ]
    assert config(temperature=0.7).temperatures == (0.7,)
    assert loads_of(config()) == []
    assert loads_of(config(request_rate=3)) == [Load(8, 3.0)]
    assert config(tree=["cost", "chain:depth=2"]).levels == (1,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "give numbers from 0 on"),
        ({"temperature": "0,-1"}, "give numbers from 0 on"),
        ({"temperature": "nan"}, "give numbers from 0 on"),
        ({"temperature": "inf"}, "give numbers from 0 on"),
        ({"request_rate": "0"}, "give requests a second"),
        ({"request_rate": "1", "concurrency": "1,4"}, "with --request-rate give one --concurrency"),
        ({"tree": ["cost", "cost"]}, "each once"),
        ({"endpoint": ["a=http://x"], "launch": ["a=vllm"]}, "a name of its own"),
        ({"target": "", "head": [], "launch": ["a=vllm"]}, "--target is missing"),
    ],
)
def test_conditions_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


@pytest.fixture
def settings(target_folder: Path, head_uri: str, tmp_path: Path) -> dict[str, Any]:
    prompts = [
        {"id": "one", "prompt": "write a line"},
        {"id": "two", "prompt": "count one two three one two three"},
    ]
    return {
        "target": str(target_folder),
        "head": head_uri,
        "prompts": [str(write_jsonl(tmp_path / "chat.jsonl", prompts))],
        "output": str(tmp_path / "report"),
        "max_new_tokens": 8,
        "tree": TREE,
        "device": "cpu",
        "dtype": "float32",
    }


def bench(settings: dict[str, Any], **changes: Any) -> tuple[Any, BenchReport]:
    result = stage.run(BenchConfig(**(settings | changes)), QUIET)
    data = open_artifact(settings["output"], "report").read("report.json")
    return result, BenchReport.model_validate_json(data)


def test_lengths_are_measured_and_reported_apart(settings: dict[str, Any], target: Target) -> None:
    bound = len(target.tokenizer.encode("write a line"))
    lengths = {"prompt_lengths": bound, "max_new_tokens": "3,6", "concurrency": "2"}
    result, report = bench(settings, **lengths, drafters="ngram,eagle3,transformers")
    names = [f"chat prompt{part}{bound} answer<={most}" for most in (3, 6) for part in ("<=", ">")]
    assert list(report.sets) == names
    assert [row.output_lengths.longest for row in report.sets.values()] == [3, 3, 6, 6]
    for level in report.sweep.levels:
        assert (level.completed, level.total_output_tokens) == (4, 3 + 3 + 6 + 6)
        assert list(level.speedup_by_set) == names
    assert report.settings["max_new_tokens"] == [3, 6]
    assert (
        "answers of up to 3 and 6 tokens"
        in open_artifact(result.output, "report").read("report.html").decode()
    )


def test_whether_the_texts_are_the_same_is_looked_at_unless_told_not_to(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "walk", lossy)
    with pytest.raises(EagleError, match="are not the target's own"):
        bench(settings, check_lossless=True)
    result, report = bench(settings, check_lossless=False, overwrite=True)
    assert result.lossless is report.lossless is None
    assert report.pooled.requests == 2
    page = open_artifact(settings["output"], "report").read("report.html").decode()
    assert "Whether the texts are the same was not looked at" in page


@pytest.mark.parametrize("name", ["plain", "eagle3", "EAGLE-3"])
def test_no_server_has_the_name_of_what_bench_measures_itself(settings: dict[str, Any], name: str) -> None:
    with (
        small_server([]) as url,
        pytest.raises(EagleError, match=f"a server is called {name}, as is what bench measures itself"),
    ):
        bench(settings, endpoint=[f"{name}={url}"])
    assert artifact_state(settings["output"]) == "missing"


def test_temperatures_are_measured_and_reported_apart(settings: dict[str, Any]) -> None:
    result, report = bench(settings, temperature="0,0.8", concurrency="2")
    assert list(report.sets) == ["chat T=0", "chat T=0.8"]
    assert {name: row.requests for name, row in report.by_temperature.items()} == {"0": 2, "0.8": 2}
    assert report.pooled.requests == 4
    assert [(level.contestant, level.temperature) for level in report.sweep.levels] == [
        ("plain", 0.0), ("eagle3", 0.0), ("plain", 0.8), ("eagle3", 0.8),
    ]  # fmt: skip
    assert all(level.completed == level.compared == level.identical == 2 for level in report.sweep.levels)
    assert report.lossless.requests == report.lossless.identical == 4 + 8
    cold, warm = report.views().values()
    assert (list(cold.sets), cold.pooled) == (["chat T=0"], report.by_temperature["0"])
    assert [level.temperature for level in warm.sweep.levels] == [0.8, 0.8]
    assert [each.set for each in warm.requests] == ["chat T=0.8"] * 2
    page = open_artifact(settings["output"], "report").read("report.html").decode()
    assert page.index("Temperature 0<") < page.index("Temperature 0.8<")
    assert "greedy" not in page
    console = Console(width=120)
    with console.capture() as shown:
        console.print(result.summary())
    assert "2 at once T=0.8" in shown.get()
    sampled = [each for each in report.requests if each.set == "chat T=0.8"]
    _, alone = bench(settings | {"output": settings["output"] + "-alone"}, temperature="0.8")
    assert [each.plain.tokens for each in alone.requests] == [each.plain.tokens for each in sampled]


def test_the_gate_looks_at_every_temperature(settings: dict[str, Any]) -> None:
    _, report = bench(settings, temperature="0,0.8", num_prompts=1)
    low = min(report.speedups, key=lambda name: report.speedups[name])
    bound = max(report.speedups.values()) * 0.999
    with pytest.raises(EagleError, match=f"at temperature {low} is .*, below --fail-below"):
        bench(settings, temperature="0,0.8", num_prompts=1, fail_below=bound)


def test_every_drafter_is_measured_with_every_tree(settings: dict[str, Any]) -> None:
    result, report = bench(settings, tree=[TREE, "chain:depth=2"], drafters="ngram:min=1,max=2,eagle3")
    names = report.sweep.contestants
    assert names[0] == "plain"
    assert [name.partition(", ")[0] for name in names[1:]] == ["eagle3", "eagle3", "ngram", "ngram"]
    assert names[2] == "eagle3, chain:depth=2"
    assert report.drafter == result.drafter == names[1]
    chain = next(level for level in report.sweep.levels if level.contestant == names[2])
    assert 0 < chain.drafted_per_step <= 2
    assert report.settings["tree"] == [TREE, "chain:depth=2"]
    assert all(level.identical == level.compared == 2 for level in report.sweep.levels)


def test_a_rate_is_a_level_of_its_own_without_a_speed_up(settings: dict[str, Any]) -> None:
    _, report = bench(settings, request_rate="40,inf", concurrency="2")
    paced, closed = report.sweep.loads
    assert (paced.rate, closed.rate) == (40.0, None)
    for level in report.sweep.at(paced):
        assert level.speedup is None
        assert level.duration >= 2 / 40
        assert level.identical == level.compared == 2
    assert all(level.speedup is not None for level in report.sweep.at(closed))
    page = open_artifact(settings["output"], "report").read("report.html").decode()
    assert "With 40 requests a second, the median wait of EAGLE-3 is" in page
    assert "Median TPOT by rate" in page
    assert report.peak_memory >= max(level.peak_memory for level in report.sweep.levels) > 0
    assert report.pooled.prompt_lengths.longest == max(each.prompt_tokens for each in report.requests)
    assert report.sweep.levels[0].output_lengths.total == report.sweep.levels[0].total_output_tokens
