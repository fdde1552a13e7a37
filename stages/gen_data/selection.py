"""Which prompts are answered: how the sources are mixed, and what is left out."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.gen_data.selection_config import SelectionConfig
from stages.gen_data.tally import Tally
from stages.prompts import Prompt, Rejected, iter_prompts
from stages.prompts.source import BUILTIN

BUILTIN_LICENSE = "Apache-2.0"
NEAR_SIGNATURE = 128
"""Numbers in a MinHash signature: similarities are estimated to about 0.04."""

EXCLUDED_SHARE = 0.6
"""A prompt with this share of an excluded text's word runs contains it, small changes and all."""

_T = TypeVar("_T")
_WORD_RUN = 5
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
_WEIGHTED = re.compile(r"(?P<source>.+)=(?P<weight>\d+(\.\d*)?|\.\d+)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A source of prompts; `weight` is None where the user gave none."""

    uri: str
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Raises EagleError: a weight of zero."""
        match = _WEIGHTED.fullmatch(text)
        if not match or "?" in match["source"]:  # the "=" of a URL's query
            return cls(text)
        if not float(match["weight"]):
            raise EagleError(
                f"--prompts {text} has weight 0: leave the source out, or give it a weight above 0"
            )
        return cls(match["source"], float(match["weight"]))


def parse_sources(texts: Sequence[str]) -> list[Source]:
    """The sources, each once.

    Raises:
        EagleError: some have a weight and some have none.
    """
    sources = [Source.parse(text) for text in dict.fromkeys(texts)]
    bare = [source.uri for source in sources if source.weight is None]
    if 0 < len(bare) < len(sources):
        raise EagleError(
            f"--prompts {bare[0]} has no weight and others have: give each one SRC=weight, or none"
        )
    return sources


def read_sources(config: SelectionConfig, seed: int, tally: Tally) -> Iterator[Prompt]:
    """The prompts of all sources, mixed; rows that are none are counted.

    Raises:
        EagleError: a source cannot be read or is empty, or nearly all rows are no prompts.
    """
    sources = parse_sources(config.prompts)
    licenses = parse_licenses(config.source_license, sources)
    streams = [
        shuffled(
            iter_prompts(source.uri, config.prompt_field),
            0 if source.uri.startswith(BUILTIN) else config.shuffle_buffer,
            random.Random(f"{seed} {source.uri}"),
        )
        for source in sources
    ]
    weights = [source.weight or 1.0 for source in sources]
    by_turns = all(source.weight is None for source in sources)
    order = turns(streams) if by_turns else drawn(streams, weights, random.Random(f"{seed} mix"))
    system = _system_prompt(config)
    for source, row in order:
        uri = sources[source].uri
        tally.drawn += 1
        if isinstance(row, Rejected):
            tally.reject(uri, row)
            tally.check(config.max_reject_rate, finished=False)
            continue
        prompt = replace(row, license=row.license or licenses[uri])
        yield prompt if system is None else replace(prompt, system=system)


def parse_licenses(texts: Sequence[str], sources: Sequence[Source]) -> dict[str, str]:
    """The licence of each source for rows that name none; "" where it is not known.

    Raises:
        EagleError: a text is not SRC=LICENCE, or names no source.
    """
    licenses = {source.uri: BUILTIN_LICENSE if source.uri.startswith(BUILTIN) else "" for source in sources}
    for text in texts:
        uri, equals, license_name = text.rpartition("=")
        if not equals or not license_name:
            raise EagleError(f"--source-license {text} is not SRC=LICENCE")
        if uri not in licenses:
            raise EagleError(
                f"--source-license {text} names no source of --prompts: use {', '.join(licenses)}"
            )
        licenses[uri] = license_name
    return licenses


def _system_prompt(config: SelectionConfig) -> str | None:
    if config.system_prompt_file is None:
        return config.system_prompt
    if config.system_prompt is not None:
        raise EagleError("--system-prompt and --system-prompt-file are both given: use one")
    where = config.system_prompt_file
    fs, path = filesystem(where)
    with storage_errors(where):
        data = bytes(fs.cat_file(path))
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise EagleError(f"--system-prompt-file {where} is not text in UTF-8") from None


def turns(streams: Sequence[Iterator[_T]]) -> Iterator[tuple[int, _T]]:
    """One item of each stream, then the next of each, until all have ended; with the stream's number."""
    running = dict(enumerate(streams))
    while running:
        for number, stream in list(running.items()):
            for item in stream:
                yield number, item
                break
            else:
                del running[number]


def drawn(
    streams: Sequence[Iterator[_T]], weights: Sequence[float], rng: random.Random
) -> Iterator[tuple[int, _T]]:
    """Items of streams drawn by weight; one that has ended is drawn no more."""
    running = dict(enumerate(streams))
    while running:
        [number] = rng.choices(list(running), [weights[number] for number in running])
        for item in running[number]:
            yield number, item
            break
        else:
            del running[number]


def shuffled(items: Iterator[_T], buffer_size: int, rng: random.Random) -> Iterator[_T]:
    """`items` in random order, as far as a buffer of that many can do it; 0 leaves the order."""
    if not buffer_size:
        yield from items
        return
    buffer: list[_T] = []
    for item in items:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        place = rng.randrange(buffer_size)
        yield buffer[place]
        buffer[place] = item
    rng.shuffle(buffer)
    yield from buffer


def distinct(prompts: Iterable[Prompt], near: float, tally: Tally) -> Iterator[Prompt]:
    """The prompts that none before them equals in system message and turns, or is as similar as `near`.

    Near duplicates are found by MinHash, so a few are missed, and a few that are a little less similar go.
    """
    import rensa

    seen: set[bytes] = set()
    sketches = rensa.RMinHashDeduplicator(near, NEAR_SIGNATURE, use_lsh=True) if near < 1 else None
    for prompt in prompts:
        key = _digest([prompt.system, *prompt.turns])
        if key in seen:
            tally.count(prompt.source, "duplicates")
        elif sketches and not sketches.add_pairs([(str(len(seen)), _character_runs(prompt))])[0]:
            tally.count(prompt.source, "near_duplicates")
        else:
            seen.add(key)
            yield prompt


def _character_runs(prompt: Prompt) -> list[str]:
    text = " ".join(" ".join([prompt.system, *prompt.turns]).lower().split())
    return sorted({text[start : start + 5] for start in range(max(1, len(text) - 4))})


class Exclusion:
    """Texts that must not come back in training prompts, such as a benchmark's questions.

    A prompt is excluded when it has `EXCLUDED_SHARE` of the runs of five words of one of the texts; a text of
    fewer words only when it is all that a turn says. Follow-up turns of fewer words ("Why?") exclude nothing.
    """

    def __init__(self) -> None:
        self._texts_with: dict[int, list[int]] = {}
        self._runs: list[int] = []

    @classmethod
    def of(cls, sources: Sequence[str]) -> Exclusion:
        """Reads all prompts of the sources.

        Raises:
            EagleError: a source cannot be read or is empty.
        """
        exclusion = cls()
        for source in sources:
            for row in iter_prompts(source):
                if isinstance(row, Rejected):
                    continue
                for number, turn in enumerate(row.turns):
                    words = _words(turn)
                    if number == 0 or len(words) >= _WORD_RUN:
                        exclusion._add(_word_runs(words))
        return exclusion

    def _add(self, runs: set[int]) -> None:
        for run in runs:
            self._texts_with.setdefault(run, []).append(len(self._runs))
        self._runs.append(len(runs))

    def holds(self, prompt: Prompt) -> bool:
        """Whether the prompt contains one of the texts."""
        if not self._runs:
            return False
        common: Counter[int] = Counter()
        for run in set().union(*(_word_runs(_words(turn)) for turn in prompt.turns)):
            common.update(self._texts_with.get(run, ()))
        return any(count >= EXCLUDED_SHARE * self._runs[text] for text, count in common.items())


def allowed(prompts: Iterable[Prompt], exclusion: Exclusion, tally: Tally) -> Iterator[Prompt]:
    """The prompts that contain no excluded text; the others are counted."""
    for prompt in prompts:
        if exclusion.holds(prompt):
            tally.count(prompt.source, "excluded")
        else:
            yield prompt


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _word_runs(words: list[str]) -> set[int]:
    if len(words) < _WORD_RUN:
        return {hash(("whole", *words))} if words else set()
    return {hash(tuple(words[i : i + _WORD_RUN])) for i in range(len(words) - _WORD_RUN + 1)}


def with_own_ids(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts with ids of their own, since seeds follow ids: the second `x` becomes `x#2`."""
    seen: Counter[str] = Counter()
    for prompt in prompts:
        seen[prompt.id] += 1
        yield prompt if seen[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}")


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256, as hex digits, of all that the prompts say, in their order."""
    return hashlib.sha256(b"".join(_digest(astuple(prompt)) for prompt in prompts)).hexdigest()


def _digest(texts: Sequence[object]) -> bytes:
    return hashlib.sha256(json.dumps(texts).encode()).digest()
