"""What a report says, in sentences."""

from __future__ import annotations

from statistics import median

from stages.bench.contestant import PLAIN
from stages.bench.levels import Level, Sweep
from stages.bench.metrics import Metrics
from stages.bench.report import BenchReport
from stages.bench.result import sameness, title

_EVEN = 0.02
"""A difference of speed that is called none."""

_STALL = 10.0
"""Times the median time of a token from which an answer is said to have been held up by something else."""


def summary(report: BenchReport) -> list[str]:
    """The main findings, one sentence or two each."""
    lines = []
    if report.pooled is not None:
        lines.append(_alone(report.pooled, title(report.drafter), len(report.sets)))
    lines += stalls(report)
    if report.sweep is not None:
        lines += _together(report.sweep, "" if report.pooled is None else report.drafter)
    if report.lossless is not None:
        lines += sameness(report.lossless, report.settings["dtype"])
    return lines


def stalls(report: BenchReport) -> list[str]:
    """A warning where single answers took so long that the totals say more about the machine."""
    times = [
        (seconds.ttft_s + seconds.decode_s, seconds.tokens, each)
        for each in report.requests
        for seconds in (each.plain, each.eagle)
    ]
    if not times:
        return []
    usual = median(seconds / tokens for seconds, tokens, _ in times)
    held = [(s, each) for s, tokens, each in times if s > _STALL * usual * tokens and s > 1.0]
    if not held:
        return []
    longest, request = max(held, key=lambda pair: pair[0])
    return [
        f"Do not trust these speeds: {len(held)} {'answer' if len(held) == 1 else 'answers'} took over "
        f"{_STALL:.0f} times as long as usual, the longest {longest:.0f} s ({request.set}, "
        f"{request.prompt_id}). Something else held the machine up; measure again."
    ]


def _alone(row: Metrics, drafter: str, sets: int) -> str:
    interval = ""
    if row.speedup_ci95 is not None:
        interval = f" (95 % interval {row.speedup_ci95[0]:.2f} to {row.speedup_ci95[1]:.2f})"
    over = f"{row.requests} answers of {sets} prompt {'set' if sets == 1 else 'sets'}"
    return (
        f"One request at a time, {drafter} is {_times(row.speedup)} plain decoding{interval}: "
        f"{row.eagle.tokens_per_s:.1f} tokens a second and not {row.plain.tokens_per_s:.1f}, over {over}. "
        f"Each pass of the target brings {row.tokens_per_step:.2f} tokens; plain decoding brings 1."
    )


def _together(sweep: Sweep, told: str) -> list[str]:
    """A sentence a concurrency; `told` is who has been spoken of where it is one request at a time."""
    lines = []
    base = {level.concurrency: level for level in sweep.of(sweep.baseline)}
    for concurrency in sorted(base):
        others = [
            level
            for level in sweep.levels
            if level.concurrency == concurrency and level.contestant != sweep.baseline
        ]
        if others and not (concurrency == 1 and [level.contestant for level in others] == [told]):
            best = max(others, key=lambda level: level.output_throughput)
            lines.append(_level(best, base[concurrency], len(others) > 1))
    return lines


def _level(best: Level, base: Level, several: bool) -> str:
    ratio = best.output_throughput / base.output_throughput
    name = title(best.contestant)
    who = f"the fastest of the others, {name}," if several else name
    waiting = ""
    if best.median_tpot_ms is not None and base.median_tpot_ms is not None:
        waiting = (
            f"; the median wait for each token is {best.median_tpot_ms:.1f} ms and not "
            f"{base.median_tpot_ms:.1f}"
        )
    baseline = "plain decoding" if base.contestant == PLAIN else title(base.contestant)
    return (
        f"With {best.concurrency} {'request' if best.concurrency == 1 else 'requests'} at once, {who} is "
        f"{_times(ratio)} {baseline}: {best.output_throughput:.1f} tokens a second and not "
        f"{base.output_throughput:.1f}{waiting}."
    )


def _times(ratio: float) -> str:
    if abs(ratio - 1) < _EVEN:
        return "as fast as"
    return f"{ratio:.2f} times as fast as"
