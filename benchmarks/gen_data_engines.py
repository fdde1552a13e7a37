"""How fast the engines of `eagle gen-data` answer, in the same run.

    python benchmarks/gen_data_engines.py --engines transformers vllm --running 32 --rounds 3

Every engine answers the same questions, with answers of one length. Engines take turns, in turning order, so
that whatever else the machine does meets all of them; ratios are medians over the rounds. An engine that
waits uses no processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

import torch

from stages.gen_data.engines.engine import AnswerEngine, Question, TransformersEngine
from stages.gen_data.rollout import AnswerSettings, Dialogue
from stages.prompts import Prompt, iter_prompts
from stages.targets import Target, load_target

MAX_LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES)[:2])
    parser.add_argument("--running", type=int, default=32, help="answers at the same time")
    parser.add_argument("--questions", type=int, default=64, help="in a round")
    parser.add_argument("--new-tokens", type=int, default=128, help="in an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target, "auto", options.dtype)
    questions = _questions(target, options)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(ENGINES[name](target, options))) for name in options.engines
        }
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            order = options.engines[turn % len(engines) :] + options.engines[: turn % len(engines)]
            for name in order:
                rate = _rate(engines[name], questions)
                print(
                    f"{'warm-up' if not turn else f'round {turn}':9} {name:14} {rate:8.1f} tok/s", flush=True
                )
                if turn:
                    rates[name].append(rate)
    _report(rates)


def _questions(target: Target, options: argparse.Namespace) -> list[Question]:
    settings = AnswerSettings(
        options.new_tokens, temperatures=(0.0,), top_p=1.0, seed=0, batch_size=options.running
    )
    found: list[Question] = []
    for prompt in iter_prompts("builtin:chat"):
        if len(found) == options.questions:
            break
        assert isinstance(prompt, Prompt)
        dialogue = Dialogue(prompt)
        if dialogue.ask(target, MAX_LENGTH - options.new_tokens):
            question = dialogue.question(str(len(found)), settings)
            found.append(replace(question, params=replace(question.params, ignore_eos=True)))
    return found


def _rate(engine: AnswerEngine, questions: list[Question]) -> float:
    """Sampled tokens a second."""
    start = time.perf_counter()
    tokens = sum(len(getattr(answer, "token_ids", ())) for answer in engine.answers(questions))
    return tokens / (time.perf_counter() - start)


def _report(rates: dict[str, list[float]]) -> None:
    first = next(iter(rates))
    print(f"\n{'':14}{'tok/s':>8}{'/ ' + first:>16}")
    for name, found in rates.items():
        ratio = statistics.median(rate / base for rate, base in zip(found, rates[first], strict=True))
        print(f"{name:14}{statistics.median(found):8.1f}{ratio:16.2f}")


def _transformers(target: Target, options: argparse.Namespace) -> AnswerEngine:
    return TransformersEngine(target, options.running)


def _vllm(target: Target, options: argparse.Namespace) -> AnswerEngine:
    from stages.gen_data.engines.vllm_engine import VllmEngine

    return VllmEngine(target, options.running, MAX_LENGTH)


ENGINES: dict[str, Callable[[Target, argparse.Namespace], AnswerEngine]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}


if __name__ == "__main__":
    main()
