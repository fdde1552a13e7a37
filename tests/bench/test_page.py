"""Claims about report.html and its charts."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.bench.hardware import Hardware
from stages.bench.levels import make_sweep
from stages.bench.lossless import verdict
from stages.bench.page import figures, make_page, pictures, stalls
from stages.bench.page.charts import STYLES, Bar, bar_chart, line_chart, nice_ticks, spread_apart
from stages.bench.record import Sample, Turn
from stages.bench.report import BenchReport, make_report
from stages.bench.workload import Job
from tests.bench.outputs import measured, output, request

MACHINE = Hardware(
    cpu="some <cpu>", cores=2, threads=2, gpu=None, python="3", torch="2", transformers="5", system="x"
)
SETTINGS = {"target": "a & b", "dtype": "bfloat16", "temperature": 0.0, "max_new_tokens": 9}


def report(name: str = "chat", *, swept: bool = True) -> BenchReport:
    slow, fast = output(range(9), decode_s=8.0), output(
        range(9), decode_s=4.0, draft_s=1.0, steps=4, drafted=8, accepted_per_depth=(3, 1)
    )  # fmt: skip
    pair = request(slow, fast)
    records = [measured(pair, name=name, prompt_id="p"), measured(pair, name=name, prompt_id="q")]
    turns = [
        Turn(
            contestant=who,
            concurrency=level,
            duration_s=seconds / level,
            prefill_s=0.1,
            draft_s=0.1,
            verify_s=0.1,
            samples=tuple(
                Sample(request=i, prompt_tokens=2, output_tokens=9, ttft_s=0.1, e2el_s=seconds, itl_s=(0.1,),
                       finish_reason="length", token_ids=tuple(range(9)), steps=8)
                for i in range(2)
            ),
        )
        for level in (1, 2)
        for who, seconds in (("plain", 20.0), ("eagle3", 8.0))
    ]  # fmt: skip
    jobs = [Job(name, each.prompt_id, 0, (), (1, 2), pair, "") for each in records]
    sweep = make_sweep(turns, jobs, ["plain", "eagle3"], [], 1) if swept else None
    return make_report(
        records, verdict(records, [], [], 0.5, dtype="bfloat16"), MACHINE, SETTINGS, sweep=sweep
    )


class Reader(HTMLParser):
    """The text of a page, its tags, and whatever it would fetch."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for key, value in attributes if key in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_but_itself() -> None:
    page = make_page(report())
    found = Reader(page)
    assert found.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert b"@import" not in page
    assert not re.search(rb"url\((?!#)", page)


def test_the_page_says_in_words_what_was_found() -> None:
    text = " ".join(Reader(make_page(report())).text)
    assert "One request at a time, EAGLE-3 is 1.80 times as fast as plain decoding" in text
    assert "With 2 requests at once, EAGLE-3 is 2.50 times as fast as plain decoding" in text
    assert "With 1 request" not in text
    assert "all 2 answers are the same, token for token" in text
    for chart in ("Median TPOT", "Output throughput", "Median TTFT", "Speed-up by task",
                  "Acceptance by position", "Where the time goes"):  # fmt: skip
        assert chart in text


def test_without_a_sweep_the_page_still_has_its_other_charts() -> None:
    text = " ".join(Reader(make_page(report(swept=False))).text)
    assert "Median TPOT" not in text
    assert "Speed-up by task" in text
    assert "Where the time goes" in text


def test_an_answer_that_the_machine_held_up_is_told() -> None:
    made = report()
    assert stalls(made) == []
    held = made.requests[1].plain.model_copy(update={"decode_s": 300.0})
    requests = [made.requests[0], made.requests[1].model_copy(update={"plain": held})]
    (line,) = stalls(made.model_copy(update={"requests": requests}))
    assert line.startswith("Do not trust these speeds: 1 answer took over 10 times as long as usual")
    assert "301 s (chat, q)" in line


def test_names_of_others_stay_text() -> None:
    found = Reader(make_page(report("<script>alert(1)</script>")))
    assert "script" not in found.tags
    assert "some <cpu>" in " ".join(found.text)


def test_every_chart_is_whole_and_says_its_numbers_to_those_who_cannot_see_it() -> None:
    charts = re.findall(r"<svg.*?</svg>", make_page(report()).decode(), flags=re.DOTALL)
    assert len(charts) == 6
    for chart in charts:
        root = ElementTree.fromstring(chart)
        kinds = [child.tag.rpartition("}")[2] for child in root]
        assert kinds[:2] == ["title", "desc"]
        assert re.search(r"\d", root[1].text or "")


def test_lines_differ_in_dashes_and_markers_and_not_in_colour_alone() -> None:
    assert len({style.dash for style in STYLES}) == len(STYLES)
    assert len({style.color for style in STYLES}) == len(STYLES)
    assert all(a.marker != b.marker for a, b in pairwise(STYLES))


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_reach_the_highest_value(most: float) -> None:
    ticks = nice_ticks(most)
    assert 4 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] >= most * (1 - 1e-6)
    assert ticks[-2] < most


@given(st.lists(st.floats(0, 200), min_size=1, max_size=8))
def test_labels_do_not_overlap_and_keep_their_order(heights: list[float]) -> None:
    ends = [(y, str(i)) for i, y in enumerate(heights)]
    placed = spread_apart(ends, 0.0, 200.0)
    assert [name for _, name in placed] == [name for _, name in sorted(ends)]
    ys = [y for y, _ in placed]
    assert all(b - a >= 16 - 1e-6 for a, b in pairwise(ys))
    assert ys[0] >= -1e-6
    assert ys[-1] <= 200 + 1e-6


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [None, 3.0], [5.0, 1e6]])
def test_a_line_chart_takes_whatever_was_measured(values: list[float | None]) -> None:
    xs = [str(i) for i in range(len(values))]
    drawn = line_chart("t", "x", "y", xs, {"a": values}, {"a": STYLES[0]})
    numbers = [float(n) for n in re.findall(r'(?:x|y|cx|cy)\d?="([-\d.]+)"', drawn)]
    assert all(-5 <= number <= 485 for number in numbers)


def test_long_names_stand_in_a_legend_above_and_are_not_cut() -> None:
    names = ["plain", "EAGLE-3, dynamic:depth=6,width=4,nodes=12"]
    lines = {name: [1.0, 2.0] for name in names}
    drawn = line_chart("t", "x", "y", ["1", "2"], lines, dict(zip(names, STYLES, strict=False)))
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert [shown.count(name) for name in names] == [1, 1]
    assert shown.count("2") == 4  # both last values at the ends, alone; a place and a tick of the axes
    legend = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>(?:plain|EAGLE)', drawn)]
    assert max(legend) < min(float(y) for y in re.findall(r'points="[\d.]+,([\d.]+)', drawn))


def test_bars_of_a_group_stand_below_its_name() -> None:
    bars = [Bar(who, 1.0, None, STYLES[0], task) for task in ("maths", "chat") for who in ("a", "b")]
    shown = re.findall(
        r'<text[^>]* y="([\d.]+)"[^>]*>([a-z]+)</text>', bar_chart("t", "x", bars, reference=1.0)
    )
    heights = [float(y) for y, name in shown if name != "x"]
    assert [name for _, name in shown if name != "x"] == ["maths", "a", "b", "chat", "a", "b"]
    assert heights == sorted(heights)
    assert all(b - a >= 16 for a, b in pairwise(heights))


def test_every_chart_is_a_picture_too() -> None:
    pytest.importorskip("resvg_py")
    made, said = report(), []
    found = pictures(made, said.append)
    assert said == []
    assert len(found) == len(figures(made)) == 6
    for name, data in found.items():
        assert re.fullmatch(r"chart-[a-z0-9-]+\.png", name)
        assert data.startswith(b"\x89PNG")
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
        assert width == 2 * (480 + 24)
        assert height > 300


def test_without_the_package_that_draws_them_there_are_none_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    said: list[str] = []
    assert pictures(report(), said.append) == {}
    (line,) = said
    assert line.startswith("no PNG charts: they need resvg-py")


def test_a_bar_chart_holds_its_whiskers() -> None:
    drawn = bar_chart("t", "x", [Bar("a", 1.0, (0.5, 3.0)), Bar("b" * 50, 1.2)], reference=1.0)
    numbers = [float(n) for n in re.findall(r'(?:x)\d?="([-\d.]+)"', drawn)]
    assert max(numbers) <= 480
    assert "b" * 30 not in drawn.partition("</desc>")[2]
