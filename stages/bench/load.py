"""How requests come: so many under way at all times, or so many a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.bench.config import BenchConfig


@dataclass(frozen=True)
class Load:
    """One level of a sweep.

    concurrency: requests under way at all times, while there are more; with a rate, those that an engine of
        this process answers together.
    rate: requests a second, which come whether or not those before are answered; None for as above.
    temperature: of all answers.
    """

    concurrency: int
    rate: float | None = None
    temperature: float = 0.0

    @property
    def words(self) -> str:
        """`4 at once`, or `0.5 a second`."""
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


def loads_of(config: BenchConfig) -> list[Load]:
    """Those that are asked for; empty where there is no sweep."""
    return [
        Load(concurrency, rate, temperature)
        for temperature in config.temperatures
        for rate in config.rates
        for concurrency in config.levels
    ]


def due_times(count: int, rate: float, seed: Sequence[int]) -> list[float]:
    """Seconds from the start at which requests are due, ascending: a Poisson process.

    Stretched so that the last comes at count / rate, as `vllm bench serve` does, since the chance of a few
    dozen gaps would otherwise decide the rate.
    """
    gaps = np.random.default_rng(list(seed)).exponential(1 / rate, count)
    times = np.cumsum(gaps)
    return list(times * (count / rate / times[-1]))
