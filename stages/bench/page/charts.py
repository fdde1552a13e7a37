"""Charts as SVG text: no script, no font, no file beside. They can be told apart without colour: by dashes,
markers and patterns, and every line carries its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 480
_SIZE = 13  # of text, in the units of WIDTH
_CHAR, _BOLD = 7.2, 8.6  # width of a character, about
_INK, _GRID = "#222", "#ddd"
_LEGEND_LINE = 20.0
LONGEST_LABEL = 30
"""Characters of what stands left of a bar."""
MOST_NAMED, LONGEST_NAME = 5, 14
"""Lines, and characters of a name, up to which names stand at the ends of their lines."""


@dataclass(frozen=True)
class Style:
    """Of one contestant, in all charts of a page."""

    color: str
    dash: str
    marker: str


# Okabe and Ito's colours, which the colour-blind can tell apart; plain decoding is black.
PLAIN_STYLE = Style("#000000", "6 4", "circle")
STYLES = (
    Style("#0072b2", "", "square"),
    Style("#d55e00", "2 3", "triangle"),
    Style("#009e73", "10 3 2 3", "diamond"),
    Style("#cc79a7", "12 5", "cross"),
    Style("#8a6d00", "4 2 1 2", "ring"),
    Style("#3a86b8", "1 4", "circle"),
    Style("#7a4fa3", "8 2", "square"),
)


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; the interval is drawn as a whisker. Bars of one group stand below its name."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    style: Style = STYLES[0]
    group: str = ""


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    xs: Sequence[str],
    lines: Mapping[str, Sequence[float | None]],
    styles: Mapping[str, Style],
    *,
    digits: int = 0,
) -> str:
    """Lines over evenly spaced places `xs`, from 0; each with its name and last value at its right end.

    Where names are long, or many, they stand in a legend above and only the values at the ends.
    """
    values = [v for line in lines.values() for v in line if v is not None]
    ticks = nice_ticks(max(values, default=1.0))
    short = len(lines) <= MOST_NAMED and max(map(len, lines), default=0) <= LONGEST_NAME
    names = {
        name: f"{name} {_number(line[-1], digits)}" if short else _number(line[-1], digits)
        for name, line in lines.items()
        if line[-1] is not None
    }
    legend, above = ([], 0.0) if short else _legend(list(lines), styles)
    right = 14 + _BOLD * max(map(len, names.values()), default=0)
    left, top, bottom = 18 + _CHAR * max(len(_tick(t)) for t in ticks), 30.0 + above, 44.0
    height = 280.0 + above
    wide, high = WIDTH - left - right, height - top - bottom

    def place(i: int, value: float) -> tuple[float, float]:
        across = 0.5 if len(xs) == 1 else 0.04 + 0.96 * i / (len(xs) - 1)
        return left + wide * across, top + high * (1 - value / ticks[-1])

    parts = [*legend, _text(4, 15 + above, y_label)]
    for tick in ticks:
        y = place(0, tick)[1]
        parts.append(_line(left, y, left + wide, y, _GRID if tick else _INK))
        parts.append(_text(left - 6, y + 4, _tick(tick), "end"))
    for i, name in enumerate(xs):
        parts.append(_text(place(i, 0)[0], top + high + 17, name, "middle"))
    parts.append(_text(left + wide / 2, height - 6, x_label, "middle"))
    ends: list[tuple[float, str]] = []
    for name, line in lines.items():
        style = styles[name]
        points = [place(i, value) for i, value in enumerate(line) if value is not None]
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{style.color}" stroke-width="2.2" '
                f'stroke-dasharray="{style.dash or "none"}"/>'
            )
        parts += [_marker(x, y, style) for x, y in points]
        if name in names:
            ends.append((points[-1][1], name))
    if ends:
        x = place(len(xs) - 1, 0)[0] + 10
        for y, name in spread_apart(ends, top, top + high - 6):
            parts.append(_text(x, y + 4, names[name], color=styles[name].color, bold=True))
    said = "; ".join(f"{name}: {', '.join(_number(v, digits) for v in line)}" for name, line in lines.items())
    return _svg(title, f"{y_label} by {x_label} ({', '.join(xs)}). {said}", height, parts)


def _legend(names: Sequence[str], styles: Mapping[str, Style]) -> tuple[list[str], float]:
    """Each name behind a piece of its line, in as many columns as fit; and how high that is."""
    room = 50 + _CHAR * max(map(len, names))
    columns = max(1, min(len(names), int(WIDTH / room)))
    parts = []
    for i, name in enumerate(names):
        x, y = 4 + WIDTH / columns * (i % columns), 10.0 + _LEGEND_LINE * (i // columns)
        style = styles[name]
        parts.append(_line(x, y, x + 30, y, style.color, 2.2, style.dash or "none"))
        parts.append(_marker(x + 15, y, style))
        parts.append(_text(x + 36, y + 4, name))
    return parts, _LEGEND_LINE * -(-len(names) // columns) + 4


def bar_chart(title: str, x_label: str, bars: Sequence[Bar], *, reference: float, digits: int = 2) -> str:
    """Bars from 0, one below the other, with a line at the reference."""
    most = max([reference, *(max(bar.value, *(bar.interval or (0.0,))) for bar in bars)])
    ticks = nice_ticks(most)
    left, row = _label_room([bar.label for bar in bars]), 26.0
    right, top = 14 + _BOLD * (digits + 4), 8.0
    begins = [bar.group != "" and (not i or bars[i - 1].group != bar.group) for i, bar in enumerate(bars)]
    wide, high = WIDTH - left - right, row * (len(bars) + sum(begins))
    height = top + high + 44

    def across(value: float) -> float:
        return left + wide * value / ticks[-1]

    parts = [_line(across(tick), top, across(tick), top + high, _GRID) for tick in ticks]
    parts += [_text(across(tick), top + high + 17, _tick(tick), "middle") for tick in ticks]
    parts.append(_text(left + wide / 2, height - 6, x_label, "middle"))
    y = top - row
    for begin, bar in zip(begins, bars, strict=True):
        y += row
        if begin:
            parts.append(_text(4, y + row / 2 + 6, bar.group, bold=True))
            y += row
        end = across(bar.value)
        parts.append(_text(left - 8, y + row / 2 + 4, _cut(bar.label), "end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 4:.1f}" width="{max(end - left, 0.5):.1f}" height="{row - 8:.1f}" '
            f'fill="{bar.style.color}" fill-opacity="0.75"/>'
        )
        if bar.interval is not None:
            low, high_end = map(across, bar.interval)
            middle = y + row / 2
            parts.append(_line(low, middle, high_end, middle, _INK, 1.6))
            parts += [_line(x, middle - 4, x, middle + 4, _INK, 1.6) for x in (low, high_end)]
            end = max(end, high_end)
        parts.append(_text(end + 6, y + row / 2 + 4, f"{_number(bar.value, digits)}x", bold=True))
    parts.append(_line(across(reference), top, across(reference), top + high, _INK, 1.6, "4 3"))
    names = (f"{bar.group}, {bar.label}" if bar.group else bar.label for bar in bars)
    said = "; ".join(f"{name}: {_number(bar.value, digits)}" for name, bar in zip(names, bars, strict=True))
    return _svg(title, f"{x_label}. {said}", height, parts)


def stacked_chart(
    title: str, x_label: str, parts_names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Bars made of parts, each part with a pattern of its own that is named above."""
    ticks = nice_ticks(max((sum(values) for _, values in rows), default=1.0))
    left, row, top, right = _label_room([label for label, _ in rows]), 26.0, 34.0, 52.0
    wide, high = WIDTH - left - right, row * len(rows)
    height = top + high + 44
    shapes = [_PATTERNS]
    x = 4.0
    for i, name in enumerate(parts_names):
        shapes.append(f'<rect x="{x:.1f}" y="6" width="16" height="14" {_fill(i)}/>')
        shapes.append(_text(x + 21, 18, name))
        x += 34 + _CHAR * len(name)
    for tick in ticks:
        x = left + wide * tick / ticks[-1]
        shapes.append(_line(x, top, x, top + high, _GRID))
        shapes.append(_text(x, top + high + 17, _tick(tick), "middle"))
    shapes.append(_text(left + wide / 2, height - 6, x_label, "middle"))
    for number, (label, values) in enumerate(rows):
        y, begin = top + row * number, left
        shapes.append(_text(left - 8, y + row / 2 + 4, _cut(label), "end"))
        for i, value in enumerate(values):
            size = wide * value / ticks[-1]
            at = f'x="{begin:.1f}" y="{y + 4:.1f}"'
            shapes.append(f'<rect {at} width="{size:.1f}" height="{row - 8:.1f}" {_fill(i)}/>')
            begin += size
        shapes.append(_text(begin + 6, y + row / 2 + 4, _number(sum(values), 1), bold=True))
    said = "; ".join(
        f"{label}: " + ", ".join(f"{n} {_number(v, 1)}" for n, v in zip(parts_names, values, strict=True))
        for label, values in rows
    )
    return _svg(title, f"{x_label}. {said}", height, shapes)


def nice_ticks(most: float) -> list[float]:
    """From 0 in four to six steps of 1, 2, 2.5 or 5 times a power of ten, to no less than `most`."""
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(
        factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if most <= 5 * factor * power * (1 + 1e-9)
    )
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def spread_apart(ends: Sequence[tuple[float, str]], top: float, bottom: float) -> list[tuple[float, str]]:
    """Heights of labels, in their order, as near to their own as a line of text between them allows."""
    gap = _SIZE + 3.0
    placed: list[tuple[float, str]] = []
    for y, name in sorted(ends):
        placed.append((max(y, placed[-1][0] + gap if placed else top), name))
    limit = max(bottom, top + gap * (len(placed) - 1))
    for i in reversed(range(len(placed))):
        y, name = placed[i]
        placed[i] = (min(y, limit), name)
        limit = placed[i][0] - gap
    return placed


_PATTERN_COLORS = ("#b8b8b8", "#56b4e9", "#0072b2", "#ffffff")
_PATTERNS = (
    '<defs><pattern id="hatch-1" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#56b4e9"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#123" stroke-width="2"/></pattern></defs>'
)


def _fill(part: int) -> str:
    color = "url(#hatch-1)" if part == 1 else _PATTERN_COLORS[part % len(_PATTERN_COLORS)]
    return f'fill="{color}" stroke="{_INK}" stroke-width="0.8"'


def _label_room(labels: Sequence[str]) -> float:
    return 16 + _CHAR * max((len(_cut(label)) for label in labels), default=0)


def _cut(label: str, most: int = LONGEST_LABEL) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _tick(value: float) -> str:
    return f"{value:,.10g}" if value < 1000 else f"{value:,.0f}"


def _text(
    x: float, y: float, text: str, anchor: str = "start", *, color: str = _INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}"{weight}>{escape(text)}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0, dash: str = "none"
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}" stroke-dasharray="{dash}"/>'
    )


def _marker(x: float, y: float, style: Style) -> str:
    paint = f'fill="{style.color}"'
    if style.marker == "square":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {paint}/>'
    if style.marker == "triangle":
        return f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z" {paint}/>'
    if style.marker == "diamond":
        return f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z" {paint}/>'
    if style.marker == "cross":
        stroke = f'stroke="{style.color}" stroke-width="2.2"'
        return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" {stroke}/>'
    if style.marker == "ring":
        stroke = f'stroke="{style.color}" stroke-width="2"'
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#fff" {stroke}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {paint}/>'


def _svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-size="{_SIZE}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )
