"""What a report says, in sentences."""

from __future__ import annotations

from statistics import median

from stages.bench.contestant import PLAIN
from stages.bench.levels import Level, Sweep
from stages.bench.load import Load
from stages.bench.metrics import Metrics
from stages.bench.report import BenchReport
from stages.bench.result import at_temperature, left_out, sameness, title

_EVEN = 0.02
"""A difference of speed that is called none."""

_STALL = 10.0
"""Times the median time of a token from which an answer is said to have been held up by something else."""


def summary(report: BenchReport) -> list[str]:
    """The main findings, one sentence or two each."""
    lines = []
    for temperature, view in report.views().items():
        if view.pooled is not None:
            at = "" if view is report else f" and at temperature {temperature:g}"
            lines.append(_alone(view.pooled, title(report.drafter), len(view.sets), at))
    lines += [] if report.pooled is None else left_out(report.pooled)
    lines += stalls(report)
    if report.sweep is not None:
        lines += _together(report.sweep, "" if report.pooled is None else report.drafter)
    if report.lossless is not None:
        lines += sameness(report.lossless, report.settings["dtype"])
    elif report.pooled is not None:
        lines.append("Whether the texts are the same was not looked at (--no-check-lossless).")
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


def _alone(row: Metrics, drafter: str, sets: int, at: str) -> str:
    interval = ""
    if row.speedup_ci95 is not None:
        interval = f" (95 % interval {row.speedup_ci95[0]:.2f} to {row.speedup_ci95[1]:.2f})"
    over = f"{row.requests} answers of {sets} prompt {'set' if sets == 1 else 'sets'}"
    return (
        f"One request at a time{at}, {drafter} is {_times(row.speedup)} plain decoding{interval}: "
        f"{row.eagle.tokens_per_s:.1f} tokens a second and not {row.plain.tokens_per_s:.1f}, over {over}. "
        f"Each pass of the target brings {row.tokens_per_step:.2f} tokens; plain decoding brings 1."
    )


def _together(sweep: Sweep, told: str) -> list[str]:
    """A sentence a load; `told` is who has been spoken of where it is one request at a time."""
    lines = []
    for load in sweep.loads:
        (base,) = (level for level in sweep.at(load) if level.contestant == sweep.baseline)
        others = [level for level in sweep.at(load) if level.contestant != sweep.baseline]
        if not others or (load.words == "1 at once" and [each.contestant for each in others] == [told]):
            continue
        when = _when(load) + at_temperature(base, sweep).replace(" T=", " at temperature ")
        if load.rate is None:
            best = max(others, key=lambda level: level.output_throughput)
            lines.append(_closed(when, best, base, len(others) > 1))
        elif base.median_tpot_ms is not None:
            known = [level for level in others if level.median_tpot_ms is not None]
            lines += [_open(when, level, base) for level in known]
    return lines


def _when(load: Load) -> str:
    if load.rate is not None:
        return f"With {load.rate:g} {'request' if load.rate == 1 else 'requests'} a second"
    return f"With {load.concurrency} {'request' if load.concurrency == 1 else 'requests'} at once"


def _closed(when: str, best: Level, base: Level, several: bool) -> str:
    ratio = best.output_throughput / base.output_throughput
    name = title(best.contestant)
    who = f"the fastest of the others, {name}," if several else name
    interval = ""
    if best.speedup_ci95 is not None:
        interval = " (95 % interval {:.2f} to {:.2f})".format(*best.speedup_ci95)
    waiting = ""
    if best.median_tpot_ms is not None and base.median_tpot_ms is not None:
        waiting = (
            f"; the median wait for each token is {best.median_tpot_ms:.1f} ms and not "
            f"{base.median_tpot_ms:.1f}"
        )
    return (
        f"{when}, {who} is {_times(ratio)} {_plain(base)}{interval}: {best.output_throughput:.1f} tokens a "
        f"second and not {base.output_throughput:.1f}{waiting}."
    )


def _open(when: str, level: Level, base: Level) -> str:
    return (
        f"{when}, the median wait of {title(level.contestant)} is {level.median_ttft_ms:.0f} ms for the "
        f"first token and {level.median_tpot_ms:.1f} ms for each further one; that of {_plain(base)} is "
        f"{base.median_ttft_ms:.0f} and {base.median_tpot_ms:.1f} ms."
    )


def _plain(base: Level) -> str:
    return "plain decoding" if base.contestant == PLAIN else title(base.contestant)


def _times(ratio: float) -> str:
    if abs(ratio - 1) < _EVEN:
        return "as fast as"
    return f"{ratio:.2f} times as fast as"
