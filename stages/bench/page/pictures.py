"""The charts as PNG files, for slides and chats that show no HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from html import escape

from stages.bench.page.charts import WIDTH
from stages.bench.page.figures import Figure, figures
from stages.bench.report import BenchReport

_ZOOM = 2.0
_MARGIN = 12
_LINE = 17
_NOTE_CHARS = 66
_FONTS = "DejaVu Sans"
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">{}</svg>'


def pictures(report: BenchReport, log: Callable[[str], None]) -> dict[str, bytes]:
    """PNG files by name, white behind, twice the size of the page's charts; none without resvg-py, which is
    told in one line."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        log("no PNG charts: they need resvg-py (pip install 'eagle-decoding[charts]'); the page has them all")
        return {}
    if _png(_EMPTY.format("")) == _png(_EMPTY.format('<text y="9">A</text>')):
        log("no PNG charts: this machine has no fonts (such as fonts-dejavu-core); the page has them all")
        return {}
    return {f"chart-{figure.name}.png": _png(framed(figure)) for figure in figures(report)}


def _png(svg: str) -> bytes:
    import resvg_py

    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg,
            zoom=_ZOOM,
            background="white",
            font_family=_FONTS,
            sans_serif_family=_FONTS,
        )
    )


def framed(figure: Figure) -> str:
    """The chart with its caption and note above it, as one SVG."""
    caption = figure.caption + (f", {figure.heading.lower()}" if figure.heading else "")
    lines = [caption, *textwrap.wrap(figure.note, _NOTE_CHARS)]
    size = re.match(r'<svg viewBox="0 0 \d+ (\d+)"', figure.svg)
    assert size is not None, "charts say their size first"
    high, above = int(size[1]), _MARGIN + _LINE * len(lines) + 6
    texts = [
        f'<text x="0" y="{_LINE * (i + 1) - 4}" font-size="{15 if i == 0 else 12}" '
        f'font-weight="{600 if i == 0 else 400}" fill="#222">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    place = f'x="0" y="{above - _MARGIN}" width="{WIDTH}" height="{high}"'
    inner = figure.svg.replace("<svg ", f"<svg {place} ", 1)
    wide, tall = WIDTH + 2 * _MARGIN, above + high + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
        f'viewBox="0 0 {wide} {tall}" font-family="{_FONTS}">'
        f'<g transform="translate({_MARGIN} {_MARGIN})">{"".join(texts)}{inner}</g></svg>'
    )
