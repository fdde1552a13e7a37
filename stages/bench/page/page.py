"""The page: summary, charts, tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stages.bench.contestant import PLAIN
from stages.bench.levels import Level, Sweep
from stages.bench.page.charts import PLAIN_STYLE, STYLES, Bar, Style, bar_chart, line_chart, stacked_chart
from stages.bench.page.words import summary
from stages.bench.report import BenchReport
from stages.bench.result import number, title

PAGE_NAME = "report.html"
DEPTHS = 8
"""Levels of a tree that are drawn; few steps get further."""

_CSS = """
body{font:16px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:62rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .4rem;break-after:avoid}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1.5rem}
figure{margin:0;break-inside:avoid}figcaption{font-weight:600}figcaption small{font-weight:400;display:block}
svg{width:100%;height:auto;font-family:system-ui,sans-serif}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{padding:.2rem .5rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th{white-space:normal;vertical-align:bottom}td.name,th.name{text-align:left}
dl{display:grid;grid-template-columns:auto 1fr;gap:0 1rem;font-size:.85rem}dd{margin:0;overflow-wrap:anywhere}
@media print{
body{max-width:none;padding:0;font-size:10pt}.charts{grid-template-columns:1fr 1fr}
table{font-size:7.5pt}th,td{padding:.1rem .25rem}
svg,figure{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def make_page(report: BenchReport) -> bytes:
    """One HTML file without scripts that needs nothing beside it."""
    styles = _styles(report)
    charts = [*_sweep_charts(report.sweep, styles), *_shared_charts(report, styles)]
    body = [
        "<h1>eagle bench</h1>",
        f"<p>{escape(_what(report))}</p>",
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in summary(report))}</ul>",
        f'<div class="charts">{"".join(charts)}</div>',
        *_tables(report),
        _losslessness(report),
        _details(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>eagle bench: {escape(_subject(report))}</title><style>{_CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    ).encode()


def _subject(report: BenchReport) -> str:
    return str(report.settings.get("target") or ", ".join(report.settings.get("endpoint", ())))


def _what(report: BenchReport) -> str:
    machine = report.hardware
    on = machine.gpu or f"{machine.cpu}, {machine.threads} {'thread' if machine.threads == 1 else 'threads'}"
    temperature = report.settings["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    most = report.settings["max_new_tokens"]
    return f"{_subject(report)} on {on}; {how}, answers of up to {most} tokens."


def _styles(report: BenchReport) -> dict[str, Style]:
    """By title, the same in every chart."""
    names = [] if report.sweep is None else report.sweep.contestants
    if report.pooled is not None:
        names = list(dict.fromkeys([PLAIN, *names, report.drafter]))
    others = [name for name in names if name != PLAIN]
    styles = {title(name): STYLES[i % len(STYLES)] for i, name in enumerate(others)}
    return {title(PLAIN): PLAIN_STYLE, **styles}


def _figure(caption: str, note: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}<small>{escape(note)}</small></figcaption>{svg}</figure>"


def _sweep_charts(sweep: Sweep | None, styles: dict[str, Style]) -> list[str]:
    if sweep is None:
        return []
    wanted = (
        ("Median TPOT", "Time per output token after the first, lower is better", "ms per token",
         "median_tpot_ms", 1),
        ("Output throughput", "All requests together, higher is better", "tokens per second",
         "output_throughput", 1),
        ("Median TTFT", "Time to the first token, lower is better", "ms", "median_ttft_ms", 0),
    )  # fmt: skip
    levels = sorted({level.concurrency for level in sweep.levels})
    charts = []
    for caption, note, unit, name, digits in wanted:
        lines = {title(each): [getattr(at, name) for at in sweep.of(each)] for each in sweep.contestants}
        svg = line_chart(
            caption, "requests at once", unit, list(map(str, levels)), lines, styles, digits=digits
        )
        charts.append(_figure(caption, note, svg))
    return charts


def _shared_charts(report: BenchReport, styles: dict[str, Style]) -> list[str]:
    charts = []
    if bars := _speedup_bars(report, styles):
        base = title(PLAIN if report.sweep is None else report.sweep.baseline)
        charts.append(
            _figure(
                "Speed-up by task",
                f"One request at a time, over {base} (dashed line); whiskers are 95 % intervals",
                bar_chart("Speed-up by task", "times as fast", bars, reference=1.0),
            )
        )
    if lines := _acceptance(report):
        depths = [str(i + 1) for i in range(max(map(len, lines.values())))]
        padded = {name: [*line, *[None] * (len(depths) - len(line))] for name, line in lines.items()}
        filled = {name: [0.0 if v is None else v for v in line] for name, line in padded.items()}
        charts.append(
            _figure(
                "Acceptance by position",
                "Share of the target's passes that accepted a draft at this position; one request at a time",
                line_chart(
                    "Acceptance by position",
                    "position in the draft",
                    "% of passes",
                    depths,
                    filled,
                    styles,
                    digits=0,
                ),
            )
        )
    if rows := _breakdown(report):
        parts = ("prompt", "draft", "verify", "other")
        charts.append(
            _figure(
                "Where the time goes",
                "Per output token; verify is the target's own passes",
                stacked_chart("Where the time goes", "ms per output token", parts, rows),
            )
        )
    return charts


def _speedup_bars(report: BenchReport, styles: dict[str, Style]) -> list[Bar]:
    """Of the pairs, and of the other contestants as far as the sweep has them at one request at a time."""
    main = title(report.drafter)
    rows = dict(report.sets)
    if len(rows) > 1 and report.pooled is not None:
        rows["all"] = report.pooled
    first = [] if report.sweep is None else [level for level in report.sweep.levels if level.concurrency == 1]
    others = [
        level
        for level in first
        if level.contestant not in (PLAIN, report.sweep and report.sweep.baseline)
        and (report.pooled is None or level.contestant != report.drafter)
    ]
    bars = []
    for name in rows or (others[0].speedup_by_set if others else {}):
        if name in rows:
            row = rows[name]
            label = f"{name}, {main}" if others else name
            bars.append(Bar(label, row.speedup, row.speedup_ci95, styles[main]))
        for level in others:
            if name in level.speedup_by_set:
                who = title(level.contestant)
                bars.append(Bar(f"{name}, {who}", level.speedup_by_set[name], None, styles[who]))
    return bars


def _acceptance(report: BenchReport) -> dict[str, list[float]]:
    """Percent by position, of whoever drafts."""
    lines: dict[str, list[float]] = {}
    if report.pooled is not None:
        lines[title(report.drafter)] = report.pooled.accepted_per_depth
    for level in () if report.sweep is None else report.sweep.levels:
        if level.concurrency == report.sweep.levels[0].concurrency and level.accepted_per_depth:  # type: ignore[union-attr]
            lines.setdefault(title(level.contestant), level.accepted_per_depth)
    return {name: [100 * share for share in line[:DEPTHS]] for name, line in lines.items() if any(line)}


def _breakdown(report: BenchReport) -> list[tuple[str, list[float]]]:
    """Milliseconds per output token: prompt, draft, verify, other."""
    rows: list[tuple[str, list[float]]] = []
    if report.sweep is not None and any(level.verify_s is not None for level in report.sweep.levels):
        for level in report.sweep.levels:
            if level.verify_s is not None:
                parts = (level.prefill_s, level.draft_s, level.verify_s, level.other_s)
                label = f"{level.concurrency} at once, {title(level.contestant)}"
                tokens = level.total_output_tokens
                rows.append((label, [1000 * (part or 0.0) / tokens for part in parts]))
    elif report.pooled is not None:
        plain, eagle = report.pooled.plain, report.pooled.eagle
        prefill = sum(each.plain.ttft_s for each in report.requests)
        rows.append(
            (title(PLAIN), [1000 * s / plain.tokens for s in (prefill, 0.0, plain.seconds - prefill, 0.0)])
        )
        shares = (eagle.prefill_share, eagle.draft_share, eagle.verify_share)
        per_token = 1000 * eagle.seconds / eagle.tokens
        other = max(0.0, 1 - sum(shares))
        rows.append((title(report.drafter), [per_token * share for share in (*shares, other)]))
    return rows


def _tables(report: BenchReport) -> list[str]:
    tables = []
    head: tuple[str, ...]
    if report.pooled is not None:
        rows = dict(report.sets)
        if len(rows) > 1:
            rows["all"] = report.pooled
        cells = [
            (
                name,
                f"{row.requests:,}",
                number(row.plain.tokens_per_s, 1),
                number(row.eagle.tokens_per_s, 1),
                f"{row.speedup:.2f}x"
                + ("" if row.speedup_ci95 is None else " ({:.2f} to {:.2f})".format(*row.speedup_ci95)),
                number(row.accepted_per_step, 2),
                number(row.tokens_per_step, 2),
            )
            for name, row in rows.items()
        ]
        head = ("prompt set", "answers", "plain tok/s", f"{title(report.drafter)} tok/s", "speed-up",
                "accepted/step", "tokens/step")  # fmt: skip
        tables.append(_table("One request at a time", head, cells))
    if report.sweep is not None:
        head = ("engine", "at once", "tok/s", "speed-up", "TTFT ms median", "p99", "TPOT ms median", "p99",
                "ITL ms median", "p99", "E2EL ms median", "p99", "accepted/step", "same text")  # fmt: skip
        tables.append(_table("Many requests at once", head, [_cells(level) for level in report.sweep.levels]))
    return tables


def _cells(level: Level) -> tuple[str, ...]:
    return (
        title(level.contestant),
        str(level.concurrency),
        number(level.output_throughput, 1),
        "" if level.speedup is None else f"{level.speedup:.2f}x",
        *(
            number(getattr(level, f"{statistic}_{name}_ms"), 1)
            for name in ("ttft", "tpot", "itl", "e2el")
            for statistic in ("median", "p99")
        ),
        number(level.accepted_per_step or None, 2),
        f"{level.identical} of {level.compared}" if level.compared else "",
    )


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        first, *rest = map(escape, cells)
        return f'<{tag} class="name">{first}</{tag}>' + "".join(f"<{tag}>{cell}</{tag}>" for cell in rest)

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<h2>{escape(caption)}</h2><div class="wide"><table><thead><tr>{row(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _losslessness(report: BenchReport) -> str:
    lossless = report.lossless
    if lossless is None:
        return ""
    said = (
        f"{lossless.identical} of {lossless.requests} answers have the token ids of plain decoding; "
        f"{lossless.near_ties} part at a near-tie, {lossless.faults} are faults."
    )
    if not lossless.divergences:
        return f"<h2>Same text</h2><p>{escape(said)}</p>"
    rows = [
        (
            f"{each.set}, {each.prompt_id}, turn {each.turn}",
            title(each.drafter or report.drafter),
            str(each.concurrency),
            each.dtype,
            str(each.position),
            "" if each.gap is None else f"{each.gap:.4f}",
            each.cause.replace("_", " "),
        )
        for each in lossless.divergences
    ]
    head = ("answer", "engine", "at once", "format", "first token that differs", "gap in float32", "cause")
    return _table("Same text", head, rows) + f"<p>{escape(said)}</p>"


def _details(report: BenchReport) -> str:
    entries = {"eagle": report.eagle_version, **report.hardware.model_dump(), **report.settings}
    items = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(_shown(value))}</dd>"
        for key, value in entries.items()
        if value not in (None, "", [])
    )
    return f"<h2>Machine and settings</h2><dl>{items}</dl>"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
