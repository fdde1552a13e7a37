"""Claims about many requests at once: the order of turns, the arithmetic, and the stage on a tiny target."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import ArtifactWriter, artifact_state, open_artifact
from stages.bench import contestant, journal, stage
from stages.bench.config import BenchConfig
from stages.bench.levels import latencies, make_sweep
from stages.bench.load import Load
from stages.bench.record import Sample, Turn
from stages.bench.report import BenchReport
from stages.bench.sweep import plan
from stages.bench.workload import Job
from stages.decoding import engine
from stages.errors import EagleError
from stages.heads import head_files, init_from_target, make_head
from stages.progress import Reporter
from stages.targets import Target
from tests.bench.outputs import output, request
from tests.bench.test_stage import TREE, lossy
from tests.tiny import write_jsonl

QUIET = Reporter(quiet=True)
JOB = Job("set", "p", 0, ())
PROMPTS = [
    {"id": "one", "prompt": "write a line"},
    {"id": "two", "turns": ["first do this", "then do that"]},
    {"id": "three", "prompt": "count one two three one two three"},
]


@given(st.integers(1, 6), st.integers(1, 70), st.lists(st.integers(1, 9), min_size=1, unique=True),
       st.integers(1, 3))  # fmt: skip
def test_everyone_answers_every_request_as_often(
    contestants: int, requests: int, levels: list[int], repeat: int
) -> None:
    answers: Counter[tuple[int, int, int]] = Counter()
    loads = [Load(level) for level in sorted(levels)]
    for step in plan(contestants, [JOB] * requests, loads, repeat):
        assert len(set(step.requests)) == len(step.requests) > 0
        answers.update((step.load.concurrency, step.contestant, request) for request in step.requests)
    assert len(answers) == len(levels) * contestants * requests
    assert set(answers.values()) == {repeat}


def test_the_order_of_turns_changes_from_round_to_round_and_from_level_to_level() -> None:
    steps = plan(2, [JOB] * 40, [Load(1), Load(8)], repeat=1)
    firsts = [steps[i].contestant for i in range(0, len(steps), 2)]
    assert firsts[:8] == [0, 1] * 4
    assert [step.load.concurrency for step in steps[16:]] == [8] * 4
    assert steps[16].contestant == 1


def sample(number: int, tokens: int, *, ttft_s: float = 1.0, gaps: tuple[float, ...] = (1.0,), **more: Any):
    return Sample(
        request=number,
        prompt_tokens=5,
        output_tokens=tokens,
        ttft_s=ttft_s,
        e2el_s=ttft_s + sum(gaps),
        itl_s=gaps,
        finish_reason="length",
        **more,
    )


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    samples = [
        sample(0, 5, ttft_s=0.5, gaps=(0.4, 0.4)),  # 0.2 s a token after the first
        sample(1, 3, ttft_s=1.0, gaps=(0.8,)),  # 0.4 s
        sample(2, 1, ttft_s=3.0, gaps=()),  # has none
    ]
    found = latencies(samples)
    assert found["mean_ttft_ms"] == pytest.approx(1500)
    assert found["median_ttft_ms"] == pytest.approx(1000)
    assert found["p99_ttft_ms"] == pytest.approx(1000 + 0.98 * 2000)
    assert found["mean_tpot_ms"] == found["median_tpot_ms"] == pytest.approx(300)
    assert found["p90_tpot_ms"] == pytest.approx(380)
    assert found["median_itl_ms"] == pytest.approx(400)
    assert found["mean_e2el_ms"] == pytest.approx(1000 * (1.3 + 1.8 + 3.0) / 3)
    assert latencies(samples[2:])["p99_tpot_ms"] is None


def test_a_level_is_total_over_total_of_all_its_turns() -> None:
    pair = request(output([1, 2]), output([1, 2]))
    jobs = [Job("a", "p", 0, (), (1,), pair, "text"), Job("b", "q", 0, (), (1,), pair, "text")]
    same = {"token_ids": (1, 2)}
    turns = [
        Turn(contestant="plain", concurrency=2, duration_s=10.0, prefill_s=1.0, draft_s=0.0, verify_s=8.0,
             samples=(sample(0, 2, steps=1, **same), sample(1, 2, steps=1, **same))),
        Turn(contestant="eagle3", concurrency=2, duration_s=1.0, prefill_s=0.1, draft_s=0.2, verify_s=0.6,
             samples=(sample(0, 2, steps=1, accepted=1, accepted_per_depth=(1,), token_ids=(1, 3)),)),
        Turn(contestant="eagle3", concurrency=2, duration_s=3.0, prefill_s=0.1, draft_s=0.2, verify_s=0.6,
             samples=(sample(1, 2, gaps=(0.0,), steps=3, accepted_per_depth=(0, 0), **same),)),
        Turn(contestant="server", concurrency=2, duration_s=5.0,
             samples=(sample(0, 2, text="text"), sample(1, 2, text="other"))),
    ]  # fmt: skip
    sweep = make_sweep(turns, jobs, ["plain", "eagle3", "server"], ["server"], 1)
    plain, eagle, server = sweep.levels
    assert (sweep.baseline, plain.speedup) == ("plain", 1.0)
    assert eagle.output_throughput == pytest.approx(4 / 4)  # the mean of the two turns would be 4/3
    assert eagle.speedup == pytest.approx(1.0 / 0.4)
    assert eagle.speedup_by_set == {"a": pytest.approx(1.0), "b": pytest.approx(2.0)}
    assert eagle.total_token_throughput == pytest.approx(14 / 4)
    assert eagle.accepted_per_step == 0.25
    assert eagle.accepted_per_depth == [0.25, 0.0]
    assert (plain.other_s, eagle.other_s) == (pytest.approx(1.0), pytest.approx(2.2))
    assert [(level.compared, level.identical) for level in sweep.levels] == [(2, 2), (2, 1), (2, 1)]
    assert (server.steps, server.verify_s, server.accepted_per_step) == (None, None, None)


def test_an_interval_is_made_of_four_rounds_and_of_no_fewer() -> None:
    """The same requests are slow for all in one round; the ratio is the same in every round but one."""
    pair = request(output([1, 2]), output([1, 2]))
    jobs = [Job("a", str(i), 0, (), (1,), pair, "") for i in range(4)]
    turns = [
        Turn(contestant=name, concurrency=1, duration_s=seconds, samples=(sample(i, 2, gaps=(seconds - 1,)),))
        for i, times in enumerate([(2.0, 1.0), (20.0, 10.0), (2.0, 1.0), (2.0, 2.0)])
        for name, seconds in zip(("plain", "ngram"), times, strict=True)
    ]
    _, level = make_sweep(turns, jobs, ["plain", "ngram"], [], 1).levels
    low, high = level.speedup_ci95 or (0.0, 0.0)
    # The last round is drawn four times in four once in 256 resamples, and three times in one of 21.
    assert (low, high) == (pytest.approx((3 * 2 + 2) / (3 * 2 + 1)), pytest.approx(2.0))
    assert level.speedup == pytest.approx(26 / 14)
    assert level.speedup_by_set_ci95["a"] == pytest.approx((low, high))
    plain, few = make_sweep(turns[:6], jobs, ["plain", "ngram"], [], 1).levels
    assert few.speedup_ci95 is None
    assert (plain.speedup_ci95, plain.speedup_by_set_ci95) == (None, {})


@pytest.fixture
def settings(target_folder: Path, head_uri: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "target": str(target_folder),
        "head": head_uri,
        "prompts": [str(write_jsonl(tmp_path / "chat.jsonl", PROMPTS))],
        "output": str(tmp_path / "report"),
        "max_new_tokens": 10,
        "tree": TREE,
        "device": "cpu",
        "dtype": "float32",
        "drafters": "none,ngram:min=1,max=2,eagle3",
        "concurrency": "3,1",
    }


def bench(settings: dict[str, Any], **changes: Any) -> Any:
    return stage.run(BenchConfig(**(settings | changes)), QUIET)


def report_of(output: str) -> BenchReport:
    return BenchReport.model_validate_json(open_artifact(output, "report").read("report.json"))


def test_a_sweep_measures_all_drafters_and_compares_every_text(settings: dict[str, Any]) -> None:
    result = bench(settings, repeat=2)
    report = report_of(settings["output"])
    assert report.drafter == "eagle3"
    assert [(level.concurrency, level.contestant) for level in report.sweep.levels] == [
        (1, "plain"), (1, "eagle3"), (1, "ngram"), (3, "plain"), (3, "eagle3"), (3, "ngram"),
    ]  # fmt: skip
    for level in report.sweep.levels:
        assert (level.completed, level.compared, level.identical) == (8, 8, 8)
        assert level.total_output_tokens == report.sweep.levels[0].total_output_tokens
        parts = level.prefill_s + level.draft_s + level.verify_s + level.other_s
        assert parts == pytest.approx(level.duration)
        assert min(level.prefill_s, level.verify_s) > 0
        assert 0 < level.median_ttft_ms <= level.p99_ttft_ms <= level.p99_e2el_ms
    plain, eagle = report.sweep.of("plain")[1], report.sweep.of("eagle3")[1]
    assert plain.accepted_per_step == 0
    assert plain.tokens_per_step == pytest.approx(1.0)
    assert eagle.accepted_per_step == pytest.approx(sum(eagle.accepted_per_depth))
    assert eagle.accepted_per_step == pytest.approx(report.pooled.accepted_per_step)
    assert report.lossless.requests == report.lossless.identical == 4 + 48
    assert result.sweep == report.sweep
    again = bench(settings, repeat=2)
    assert again.model_copy(update={"seconds": result.seconds}) == result


def test_every_kind_of_drafter_runs_side_by_side(
    settings: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    heads = [settings["head"]]
    for kind in ("eagle1", "medusa"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = make_head(kind, target.config, target.vocab_size)
        init_from_target(
            head,
            {
                "embed_tokens.weight": target.model.get_input_embeddings().weight,
                "norm.weight": target.decoder.norm.weight,
                "lm_head.weight": target.model.get_output_embeddings().weight,
            },
        )
        heads.append(str(tmp_path / kind))
        with ArtifactWriter.open(heads[-1], "head", {}, target=target.fingerprint) as writer:
            for name, data in head_files(head).items():
                writer.add_file(name, data)
            writer.finish({})
    drafters = f"none,ngram,medusa,eagle1,eagle3,draft:{settings['target']}"
    result = bench(settings, head=heads, drafters=drafters, concurrency="2")
    found = {level.contestant: level for level in result.sweep.levels}
    assert list(found) == ["plain", "medusa", "eagle1", "eagle3", "ngram", "draft:target"]
    assert all(level.identical == level.compared == 4 for level in found.values())
    assert found["draft:target"].accepted_per_step > 0.5  # the target itself is always right
    assert all(found[kind].drafted_per_step > 0 for kind in ("medusa", "eagle1", "eagle3"))


def test_a_verifier_that_is_lossy_only_in_the_sweep_is_caught(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = stage.measure

    def then_lossy(*given: Any) -> Any:
        measured = measure(*given)
        monkeypatch.setattr(engine, "walk", lossy)
        return measured

    monkeypatch.setattr(stage, "measure", then_lossy)
    with pytest.raises(EagleError, match=r"answers are not the target's own; .* EAGLE-3, 3 at once"):
        bench(settings, drafters="", concurrency="3")
    report = report_of(settings["output"])
    assert report.lossless.faults > 0
    assert {(each.drafter, each.concurrency) for each in report.lossless.divergences} == {("eagle3", 3)}


def test_an_interrupted_sweep_continues_behind_the_turns_it_has(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMMIT_SECONDS", 0)
    answer, turns = contestant.InProcess.answer, []

    def interrupted(self: Any, jobs: Any, concurrency: int, params: Any, due: Any = None) -> Turn:
        turn = answer(self, jobs, concurrency, params, due)
        if params.max_new_tokens == settings["max_new_tokens"] and not params.ignore_eos:
            turns.append((self.name, concurrency))
            if len(turns) == 3:
                raise KeyboardInterrupt
        return turn

    monkeypatch.setattr(contestant.InProcess, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(settings)
    assert artifact_state(settings["output"]) == "partial"
    before = {path.name: path.read_bytes() for path in Path(settings["output"]).glob("sweep-*")}
    assert len(before) == 2
    bench(settings)
    after = {path.name: path.read_bytes() for path in Path(settings["output"]).glob("sweep-*")}
    assert before.items() < after.items()
    assert turns[3] == turns[2]  # this one was lost
    assert len(turns) - 1 == len(after) == 3 * (2 + 1)  # two rounds one at a time, and one of three at once


def test_the_report_follows_its_schema(settings: dict[str, Any]) -> None:
    bench(settings, drafters="", concurrency="2")
    artifact = open_artifact(settings["output"], "report")
    schema, report = (json.loads(artifact.read(name)) for name in ("report.schema.json", "report.json"))
    assert set(report) == set(schema["properties"])
    level = schema["$defs"]["Level"]["properties"]
    assert set(report["sweep"]["levels"][0]) == set(level)
    assert "first" in level["mean_tpot_ms"]["description"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": "9"}, "--concurrency 9 needs at least 9 requests, and the prompts give 4"),
        ({"drafters": "none"}, "--drafters none leaves nothing to compare"),
        ({"drafters": "eagle3,medusa"}, "drafter medusa needs a --head of that kind"),
        ({"drafters": "ngram"}, "a --head is of kind eagle3, which --drafters does not name: add eagle3"),
        ({"endpoint": ["x=http://127.0.0.1:9"]}, "endpoint x cannot be used at http://127.0.0.1:9/v1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EagleError) as error:
        bench(settings, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
