"""How fast prompts are searched for personal data, where the time goes, and whether memory stays flat.

    python benchmarks/pii.py speed --prompts builtin:chat
    python benchmarks/pii.py memory --rows 200000
    python benchmarks/pii.py parts --prompts builtin:chat

`speed` takes the prompts round and round for as many rows as asked for, once in this process and once with
all cores, the start of the processes apart; `memory` reports what the processes hold while it goes on;
`parts` says how long each recognizer takes of one process's time, and what presidio's engine adds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator

import psutil
from rich.console import Console

from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import make_detector
from stages.gen_data.privacy.normal import normalise
from stages.gen_data.privacy.pool import processes, scan_rows
from stages.gen_data.privacy.rules import Search
from stages.prompts import Prompt, iter_prompts

console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "memory", "parts"])
    parser.add_argument("--prompts", action="append", metavar="SRC", help="default: builtin:chat")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pii-entities", action="append", metavar="NAME", help="as for eagle gen-data")
    given = parser.parse_args()
    texts = [
        (prompt.system, *prompt.turns)
        for source in given.prompts or ["builtin:chat"]
        for prompt in iter_prompts(source)
        if isinstance(prompt, Prompt)
    ]
    characters = sum(len(text) for row in texts for text in row) / len(texts)
    console.print(
        f"{len(texts):,} prompts of {characters:,.0f} characters, {len(os.sched_getaffinity(0))} cores"
    )
    search = Search.of(PrivacyConfig(pii_entities=given.pii_entities or ["default"]))
    measure = {"speed": speed, "memory": memory, "parts": parts}[given.what]
    measure(search, texts, given.rows)


def rounds(texts: list[tuple[str, ...]], rows: int) -> Iterator[tuple[str, ...]]:
    return itertools.islice(itertools.cycle(texts), rows)


def speed(search: Search, texts: list[tuple[str, ...]], rows: int) -> None:
    start = time.perf_counter()
    detector = make_detector(search)
    detector.scan(["a@example.com 212-555-0123"])
    console.print(f"one process: ready in {time.perf_counter() - start:.1f} s")
    start, cpu = time.perf_counter(), time.process_time()
    for row in rounds(texts, min(rows, 5_000)):
        detector.scan(row)
    report("one process", min(rows, 5_000), time.perf_counter() - start, time.process_time() - cpu)
    begin = time.perf_counter()
    results = scan_rows(rounds(texts, rows), lambda row: row, search, detector)
    for _ in range(1_000):
        next(results)
    start = time.perf_counter()
    console.print(f"{processes(search)} processes: the first 1,000 prompts after {start - begin:.1f} s")
    rest = sum(1 for _ in results)
    report(f"{processes(search)} processes", rest, time.perf_counter() - start)
    report("with their start", rows, time.perf_counter() - begin)


def report(what: str, rows: int, seconds: float, cpu: float | None = None) -> None:
    by_cpu = f", {rows / cpu:,.0f} a CPU second" if cpu else ""
    console.print(f"{what}: {rows:,} prompts in {seconds:.1f} s, {rows / seconds:,.0f} prompts/s{by_cpu}")


def memory(search: Search, texts: list[tuple[str, ...]], rows: int) -> None:
    here = psutil.Process()
    results = scan_rows(rounds(texts, rows), lambda row: row, search, make_detector(search))
    step = max(1, rows // 10)
    for number, _ in enumerate(results, start=1):
        if number == 1_000 or number % step == 0:
            own = here.memory_info().rss / 2**20
            others = [child.memory_info().rss / 2**20 for child in here.children(recursive=True)]
            largest = max(others, default=0.0)
            console.print(
                f"{number:>9,} prompts: {own:,.0f} MiB here, {largest:,.0f} MiB in the largest process"
            )


def parts(search: Search, texts: list[tuple[str, ...]], rows: int) -> None:
    from stages.gen_data.privacy.analyzer import PresidioDetector

    detector = PresidioDetector(search)
    flat = [text for row in rounds(texts, min(rows, 5_000)) for text in row]
    spent: dict[str, float] = {}
    reached: Counter[str] = Counter()

    start = time.process_time()
    normal = [normalise(text).text for text in flat]
    spent["normal form"] = time.process_time() - start
    for form in detector.forms:
        start = time.process_time()
        passing = [text for text in normal if form.may_find(text)]
        spent[f"{form.entity}: may it be there"] = time.process_time() - start
        reached[form.entity] = len(passing)
        start = time.process_time()
        for text in passing:
            list(form.find(text))
        spent[f"{form.entity}: where ({len(passing):,} texts)"] = time.process_time() - start
    start = time.process_time()
    detector.scan(flat)
    whole = time.process_time() - start
    spent["presidio's engine, and the rest"] = whole - sum(spent.values())
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        console.print(f"{seconds / len(flat) * 1e6:8.1f} us a text  {name}")
    console.print(f"{whole / len(flat) * 1e6:8.1f} us a text  in all, {len(flat):,} texts")


if __name__ == "__main__":
    main()
