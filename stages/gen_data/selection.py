"""Which prompts are answered: how the sources are mixed, and that none comes twice."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.gen_data.selection_config import SelectionConfig
from stages.gen_data.tally import Tally
from stages.prompts import Prompt, Rejected, iter_prompts
from stages.prompts.source import BUILTIN
from stages.prompts.text import encodable
from stages.prompts.web import SCHEMES

BUILTIN_LICENSE = "Apache-2.0"
NEAR_SIGNATURE = 128
"""Numbers in a MinHash signature: similarities are estimated to about 0.04."""

SHUFFLED_CHARACTERS = 100_000_000
"""Most characters that wait in a shuffle buffer: 100 to 400 MB of memory."""

_T = TypeVar("_T")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|infinity|nan)", re.ASCII | re.IGNORECASE)
_OWN_ENDING = re.compile(r"[~#@]\d+$", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A source of prompts; `weight` is None where the user gave none."""

    uri: str
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Raises EagleError: a weight that is not above zero, or none at all."""
        uri, _, weight = text.rpartition("=")
        in_query = uri.startswith(SCHEMES) and "=" not in re.split("[?&]", uri)[-1] and "?" in uri
        if not uri or in_query or not _NUMBER.fullmatch(weight):
            return cls(text)
        if not 0 < float(weight) < math.inf:
            raise EagleError(
                f"--prompts {text} has weight {weight}: leave the source out, or give it a weight above 0"
            )
        return cls(uri, float(weight))


def parse_sources(texts: Sequence[str]) -> list[Source]:
    """The sources, each once.

    Raises:
        EagleError: some have a weight and some have none, or one has two.
    """
    sources = [Source.parse(text) for text in dict.fromkeys(texts)]
    for uri, times in Counter(source.uri for source in sources).items():
        if times > 1:
            raise EagleError(f"--prompts {uri} is given with {times} weights: give it one")
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
            _characters,
            SHUFFLED_CHARACTERS,
        )
        for source in sources
    ]
    weights = [source.weight or 1.0 for source in sources]
    by_turns = all(source.weight is None for source in sources)
    order = turns(streams) if by_turns else drawn(streams, weights, random.Random(f"{seed} mix"))
    system = _system_prompt(config)
    for source, row in order:
        uri = sources[source].uri
        tally.draw(uri)
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
        licenses[uri] = encodable(license_name)
    return licenses


def _system_prompt(config: SelectionConfig) -> str | None:
    if config.system_prompt_file is None:
        return None if config.system_prompt is None else encodable(config.system_prompt)
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
        largest = max(weights[number] for number in running)  # sums of very large ones are infinite
        [number] = rng.choices(list(running), [weights[number] / largest for number in running])
        for item in running[number]:
            yield number, item
            break
        else:
            del running[number]


def shuffled(
    items: Iterator[_T],
    buffer_size: int,
    rng: random.Random,
    size: Callable[[_T], int] = lambda item: 0,
    most: int = 0,
) -> Iterator[_T]:
    """`items` in random order, as far as a buffer of that many can do it; 0 leaves the order.

    Args:
        size, most: the buffer holds fewer items if their sizes are more than that in all.
    """
    buffer: list[_T] = []
    held = 0
    for item in items:
        buffer.append(item)
        held += size(item)
        while len(buffer) > buffer_size or (held > most and len(buffer) > 1):
            place = rng.randrange(len(buffer)) if buffer_size else 0
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            held -= size(buffer[-1])
            yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


def _characters(row: Prompt | Rejected) -> int:
    return sum(map(len, (row.system, row.tools, *row.turns))) if isinstance(row, Prompt) else 0


def distinct(prompts: Iterable[Prompt], near: float, tally: Tally) -> Iterator[Prompt]:
    """The prompts that none before them equals, or is as similar as `near` in what users say.

    With another system message or other tools a prompt is another one, however long those are. Near
    duplicates are found by MinHash, so a few are missed, and a few that are a little less similar go.
    """
    import rensa

    seen: set[bytes] = set()
    sketches = rensa.RMinHashDeduplicator(near, NEAR_SIGNATURE, use_lsh=True) if near < 1 else None
    for prompt in prompts:
        key = _digest([prompt.system, prompt.tools, *prompt.turns])
        if key in seen:
            tally.count(prompt.source, "duplicates")
        elif sketches and not sketches.add_pairs([(str(len(seen)), _character_runs(prompt))])[0]:
            tally.count(prompt.source, "near_duplicates")
        else:
            seen.add(key)
            yield prompt


def _character_runs(prompt: Prompt) -> list[str]:
    text = " ".join(" ".join(prompt.turns).lower().split())
    setting = _digest([prompt.system, prompt.tools]).hex()[:16] if prompt.system or prompt.tools else ""
    return sorted({setting + text[start : start + 5] for start in range(max(1, len(text) - 4))})


def with_own_ids(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts with ids of their own, since seeds follow ids: the second `x` becomes `x~2`.

    Ids that look as if they were made so, or as those of answers (`x@2`) and of rows (`x#2`), get `~1`: no
    two rows of the artifact have the same id then.
    """
    seen: Counter[str] = Counter()
    for prompt in prompts:
        seen[prompt.id] += 1
        number = seen[prompt.id]
        made = number > 1 or _OWN_ENDING.search(prompt.id)
        yield replace(prompt, id=f"{prompt.id}~{number}") if made else prompt


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256, as hex digits, of all that the prompts say, in their order."""
    names = [field.name for field in fields(Prompt)]
    whole = hashlib.sha256()
    for prompt in prompts:
        whole.update(_digest([getattr(prompt, name) for name in names]))
    return whole.hexdigest()


def _digest(texts: Sequence[object]) -> bytes:
    return hashlib.sha256(json.dumps(texts).encode()).digest()
