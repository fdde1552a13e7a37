"""`/metrics`, `/version`, `/health` and the lines of the log, against what was asked."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stages import __version__
from stages.decoding import EagleModel
from tests.serve.running_server import RunningServer, running_server, soon


def counts(server: RunningServer, name: str) -> float:
    """A counter, summed over its labels."""
    return sum(value for key, value in server.metrics().items() if key.split("{")[0] == f"eagle_{name}")


def test_metrics_add_up_to_what_was_asked(drafted: EagleModel) -> None:
    with running_server(drafted) as server:
        bodies = [
            server.chat(max_tokens=10, temperature=0, ignore_eos=True).json(),
            server.chat(max_tokens=30, temperature=1, seed=2, n=2, ignore_eos=True).json(),
            server.complete("the heat", max_tokens=20, temperature=1, seed=3, stop="e").json(),
        ]
        server.chat(temperature=9)
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True, "ignore_eos": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            running = server.metrics()["eagle_answers_running"]
        assert running == 1
        assert soon(lambda: server.metrics().get('eagle_requests_total{outcome="cancelled"}') == 1)
        assert soon(lambda: server.metrics()["eagle_answers_running"] == 0)
        metrics = server.metrics()
        outcomes = {"complete": 3, "refused": 1, "cancelled": 1}
        assert {k: metrics[f'eagle_requests_total{{outcome="{k}"}}'] for k in outcomes} == outcomes
        assert counts(server, "requests_total") == 5
        assert counts(server, "answers_total") == 4
        assert metrics['eagle_answers_total{finish_reason="length"}'] >= 3
        assert metrics["eagle_time_to_first_token_seconds_count"] == 5
        assert metrics["eagle_time_per_output_token_seconds_count"] in (3, 4)
        assert metrics["eagle_request_seconds_count"] == 3
        assert metrics["eagle_answers_waiting"] == 0
        usages = [body["usage"] for body in bodies]
        cancelled = server.log[-1]
        prompt, answer = (int(part) for part in cancelled.split(": ")[1].split(" ")[0].split("+"))
        assert counts(server, "prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages) + prompt
        assert counts(server, "generated_tokens_total") == (
            sum(u["completion_tokens"] for u in usages) + answer
        )
        assert counts(server, "accepted_tokens_total") == counts(server, "accepted_tokens_per_position_total")
        for name in ("drafted", "accepted"):
            assert counts(server, f"{name}_tokens_total") >= sum(u["speculation"][name] for u in usages) > 0
        families = {
            family.name: family.type
            for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        }
        assert families["eagle_decode_steps"] == "counter"
        assert families["eagle_time_to_first_token_seconds"] == "histogram"


def test_the_version_is_that_of_the_package(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}


def test_health_is_503_once_the_engine_takes_no_more(plain: EagleModel) -> None:
    with running_server(plain) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.engine.stop(0.0)
        response = httpx.get(f"{server.url}/health")
        assert (response.status_code, response.json()["status"]) == (503, "stopping")


def test_json_lines_tell_times_and_speculation_and_no_text(drafted: EagleModel) -> None:
    with running_server(drafted, log_format="json") as server:
        body = server.chat("a secret word", temperature=1, seed=1, max_tokens=30, ignore_eos=True).json()
        server.chat("a secret word", secret=5)
        assert "secret" not in "".join(server.log)
        done, refused = (json.loads(line) for line in server.log)
    usage = body["usage"]
    assert done["id"] == body["id"]
    assert done["outcome"] == "length"
    assert (done["prompt_tokens"], done["completion_tokens"]) == (usage["prompt_tokens"], 30)
    assert done["seconds"] >= done["ttft_s"] + 29 * done["tpot_s"] - 0.01
    for name in ("steps", "drafted", "accepted", "accepted_per_step"):
        assert done[name] == usage["speculation"][name]
    assert {**refused, "time": "", "request_id": ""} == {
        "time": "",
        "request_id": "",
        "outcome": "refused",
        "status": 400,
        "code": "unknown_parameter",
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_failure_is_one_entry_with_its_traceback(
    plain: EagleModel, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    with running_server(plain, log_format=form) as server:  # type: ignore[arg-type]
        monkeypatch.setattr(server.engine._engine, "_admit", None)
        assert server.chat().status_code == 500
        monkeypatch.undo()
        trace, line = server.log
        assert "TypeError" in trace
        assert "engine_error" in line
        assert server.metrics()['eagle_requests_total{outcome="failed"}'] == 1
