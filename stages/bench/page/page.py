"""The page: summary, charts, tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stages.bench.levels import Level, Sweep
from stages.bench.page.figures import Figure, figures
from stages.bench.page.words import summary
from stages.bench.report import BenchReport
from stages.bench.result import at_temperature, number, rows_of, speedup_cell, title

PAGE_NAME = "report.html"

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
    body = [
        "<h1>eagle bench</h1>",
        f"<p>{escape(_what(report))}</p>",
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in summary(report))}</ul>",
        *_charts(report),
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
    servers = [each.partition("=")[0] for each in report.settings.get("endpoint", ())]
    return str(report.settings.get("target") or ", ".join(servers))


def _what(report: BenchReport) -> str:
    machine = report.hardware
    on = machine.gpu or f"{machine.cpu}, {machine.threads} {'thread' if machine.threads == 1 else 'threads'}"
    given = report.settings["temperature"]
    several = given if isinstance(given, list) else [given]
    how = "greedy" if several == [0] else f"temperature {' and '.join(f'{each:g}' for each in several)}"
    given = report.settings["max_new_tokens"]
    most = " and ".join(map(str, given)) if isinstance(given, list) else given
    return f"{_subject(report)} on {on}; {how}, answers of up to {most} tokens."


def _charts(report: BenchReport) -> list[str]:
    """Under a heading for each temperature, where there are several."""
    drawn = figures(report)
    parts = []
    for heading in dict.fromkeys(each.heading for each in drawn):
        if heading:
            parts.append(f"<h2>{escape(heading)}</h2>")
        charts = [_figure(each) for each in drawn if each.heading == heading]
        parts.append(f'<div class="charts">{"".join(charts)}</div>')
    return parts


def _figure(figure: Figure) -> str:
    caption, note = escape(figure.caption), escape(figure.note)
    return f"<figure><figcaption>{caption}<small>{note}</small></figcaption>{figure.svg}</figure>"


def _tables(report: BenchReport) -> list[str]:
    tables = []
    head: tuple[str, ...]
    rows = rows_of(report.sets, report.by_temperature, report.pooled)
    if rows:
        cells = [
            (
                name,
                f"{row.requests:,}",
                number(row.plain.tokens_per_s, 1),
                number(row.eagle.tokens_per_s, 1),
                speedup_cell(row.speedup, row.speedup_ci95),
                number(row.accepted_per_step, 2),
                number(row.tokens_per_step, 2),
            )
            for name, row in rows.items()
        ]
        head = ("prompt set", "answers", "plain tok/s", f"{title(report.drafter)} tok/s", "speed-up",
                "accepted/step", "tokens/step")  # fmt: skip
        tables.append(_table("One request at a time", head, cells))
    if report.sweep is not None:
        head = ("engine", "load", "tok/s", "speed-up", "TTFT ms median", "p99", "TPOT ms median", "p99",
                "ITL ms median", "p99", "E2EL ms median", "p99", "accepted/step", "memory GB",
                "same text")  # fmt: skip
        levels = [_cells(level, report.sweep) for level in report.sweep.levels]
        tables.append(_table("Many requests at once", head, levels))
    return [*tables, *_lengths(report)]


def _cells(level: Level, sweep: Sweep) -> tuple[str, ...]:
    return (
        title(level.contestant),
        level.load.words + at_temperature(level, sweep),
        number(level.output_throughput, 1),
        speedup_cell(level.speedup, level.speedup_ci95),
        *(
            number(getattr(level, f"{statistic}_{name}_ms"), 1)
            for name in ("ttft", "tpot", "itl", "e2el")
            for statistic in ("median", "p99")
        ),
        number(level.accepted_per_step or None, 2),
        number(None if level.peak_memory is None else level.peak_memory / 1e9, 2),
        f"{level.identical} of {level.compared}" if level.compared else "",
    )


def _lengths(report: BenchReport) -> list[str]:
    """Of the sets, or of what the first contestant was asked where there are none."""
    known = {
        name: (row.prompt_lengths, row.output_lengths)
        for name, row in rows_of(report.sets, report.by_temperature, report.pooled).items()
    }
    if not known and report.sweep is not None:
        known = {
            f"{title(level.contestant)}, {level.load.words}": (level.prompt_lengths, level.output_lengths)
            for level in report.sweep.levels
        }
    rows = [
        (
            name,
            *(f"{value:,.0f}" for each in pair if each for value in (each.median, each.p90, each.longest)),
        )
        for name, pair in known.items()
        if None not in pair
    ]
    head = ("", "prompt tokens median", "p90", "longest", "answer tokens median", "p90", "longest")
    return [_table("Lengths", head, rows)] if rows else []


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
