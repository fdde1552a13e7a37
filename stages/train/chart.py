"""The course of a training as a picture: loss, agreement and tokens per step over the tokens trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN, GAP = 340, 220, 48, 24
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
TICKS = 4


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def draw_chart(log: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG of the lines of metrics.jsonl: three panels side by side. One line for each draft step."""
    trained = [line for line in log if "loss" in line]
    held = [(line["tokens"], line["holdout"]) for line in log if "holdout" in line]
    steps = range(len(trained[0]["loss"]) if trained else 0)
    measured = range(len(held[0][1]["agreement"]) if held else 0)
    loss = [Line(f"step {i + 1}", [(line["tokens"], line["loss"][i]) for line in trained]) for i in steps]
    agreement = [Line(f"step {i + 1}", [(x, each["agreement"][i]) for x, each in held]) for i in measured] + [
        Line("", [(line["tokens"], line["agreement"][i]) for line in trained], dashed=True) for i in steps
    ]
    worth = [
        Line("chain", [(x, each["tokens_per_step"]) for x, each in held]),
        Line("chain, temperature 1", [(x, each["sampled"]["tokens_per_step"]) for x, each in held]),
        Line("tree", [(x, each["tree"]["tokens_per_step"]) for x, each in held]),
    ]
    panels = [
        _panel("training loss, nats", loss, 12),
        _panel("top-1 agreement (held out; dashed: training)", agreement, HEIGHT - 13 * len(measured)),
        _panel("held-out tokens per step, simulated", worth, HEIGHT - 13 * len(worth)),
    ]
    width, height = len(panels) * (WIDTH + MARGIN + GAP), HEIGHT + 2 * MARGIN
    placed = "".join(
        f'<g transform="translate({MARGIN + place * (WIDTH + MARGIN + GAP)},{MARGIN})">{panel}</g>'
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="18" font-size="13">{escape(title)}</text>{placed}</svg>\n'
    )


def _panel(title: str, lines: Sequence[Line], names_at: float) -> str:
    """Axes and lines; their names are listed from `names_at` downwards, where the lines leave room."""
    points = [point for line in lines for point in line.points]
    if not points:
        return f"{_text(0, -8, title)}{_text(0, HEIGHT / 2, 'nothing was measured')}"
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        return x / max(right, 1) * WIDTH, HEIGHT - (y - low) / (high - low) * HEIGHT

    parts = [_text(0, -8, title), f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#888"/>']
    for tick in range(TICKS + 1):
        x, y = right * tick / TICKS, low + (high - low) * tick / TICKS
        at_x, at_y = place(x, y)
        parts.append(_text(at_x, HEIGHT + 16, _tokens(x), "middle"))
        parts.append(_text(-6, at_y + 4, f"{y:.2f}", "end"))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        if line.dashed:
            colour = COLOURS[(number - len([each for each in lines if not each.dashed])) % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        dash = ' stroke-dasharray="3 3" opacity="0.5"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        if not line.dashed:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="{colour}"/>'
                for x, y in (place(*point) for point in line.points)
                if len(line.points) < 30
            ]
            parts.append(_text(WIDTH - 4, names_at + 13 * number, line.name, "end", colour))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _tokens(count: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
