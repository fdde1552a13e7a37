"""`eagle bench` and `vllm bench serve` make the same numbers of the same times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.bench.levels import LATENCIES, make_sweep
from stages.bench.record import Sample, Turn
from stages.bench.workload import Job
from tests.vllm.installed import needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = st.floats(1e-4, 100.0)
ANSWERS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 200), SECONDS, st.lists(SECONDS, max_size=8)), min_size=1
)


@needs_vllm
@settings(deadline=None)
@given(ANSWERS, SECONDS)
def test_the_numbers_of_a_level_are_those_of_vllm_bench_serve(
    answers: list[tuple[int, int, float, list[float]]], duration: float
) -> None:
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    samples, outputs = [], []
    for number, (read, written, ttft, gaps) in enumerate(answers):
        latency = ttft + sum(gaps)
        samples.append(
            Sample(request=number, prompt_tokens=read, output_tokens=written, ttft_s=ttft, e2el_s=latency,
                   itl_s=tuple(gaps), finish_reason="stop")
        )  # fmt: skip
        outputs.append(
            RequestFuncOutput(success=True, latency=latency, output_tokens=written, ttft=ttft,
                                           itl=list(gaps), prompt_len=read)
        )  # fmt: skip
    turn = Turn(contestant="e", concurrency=1, duration_s=duration, samples=tuple(samples))
    jobs = [Job("set", str(number), 0, ()) for number in range(len(answers))]
    (level,) = make_sweep([turn], jobs, ["e"], ["e"], 1).levels
    theirs, lengths = calculate_metrics([], outputs, duration, None, [90.0, 99.0], {})
    assert lengths == [written for _, written, _, _ in answers]

    def same(name: str, value: Any) -> None:
        assert getattr(level, name) == pytest.approx(float(value), rel=1e-9), name

    same("completed", theirs.completed)
    same("total_input_tokens", theirs.total_input)
    same("total_output_tokens", theirs.total_output)
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        same(name, getattr(theirs, name))
    for name in LATENCIES:
        if getattr(level, f"mean_{name}_ms") is None:  # where there is none vLLM says 0
            assert getattr(theirs, f"mean_{name}_ms") == 0
            continue
        same(f"mean_{name}_ms", getattr(theirs, f"mean_{name}_ms"))
        same(f"median_{name}_ms", getattr(theirs, f"median_{name}_ms"))
        for percent, value in getattr(theirs, f"percentiles_{name}_ms"):
            same(f"p{percent:.0f}_{name}_ms", value)
