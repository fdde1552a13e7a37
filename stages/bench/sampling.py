"""How answers are drawn: the settings of a run, and of each of its sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stages.bench.config import BenchConfig
from stages.bench.prompt_sets import PromptSet
from stages.decoding import SamplingParams


def sampling(config: BenchConfig) -> SamplingParams:
    """At the first temperature, as long as any answer."""
    return SamplingParams(
        max_new_tokens=config.answer_lengths[-1], temperature=config.temperatures[0], seed=config.seed
    )


def sampling_of(config: BenchConfig, sets: Sequence[PromptSet], name: str) -> SamplingParams:
    """Of a set, by its name."""
    return of_set(sampling(config), next(each for each in sets if each.name == name))


def of_set(params: SamplingParams, own: PromptSet) -> SamplingParams:
    """At its temperature, and as long as its answers."""
    most = params.max_new_tokens if own.max_new_tokens is None else own.max_new_tokens
    return replace(params, temperature=own.temperature, max_new_tokens=most)
