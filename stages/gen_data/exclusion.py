"""Keeping benchmarks out of training: prompts that contain a text are found, small changes and all."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stages.gen_data.tally import Tally
from stages.prompts import Prompt, Rejected, iter_prompts

EXCLUDED_SHARE = 0.6
"""A prompt with this share of an excluded text's word runs contains it, small changes and all."""

_WORD_RUN = 5
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
_Runs = NDArray[np.int64]


class Exclusion:
    """Texts that must not come back in training prompts, such as a benchmark's questions.

    A prompt is excluded when it has `EXCLUDED_SHARE` of the runs of five words of one of the texts; a text of
    fewer words only when it is all that a turn says. Follow-up turns of fewer words ("Why?") exclude nothing.

    A prompt that has that share of a text's runs has one of its rarest runs too, whichever it lacks. So only
    those are looked up, and texts that all begin with the same instruction are not compared one by one.
    """

    def __init__(self, texts: Sequence[_Runs]) -> None:
        """`texts` are the runs of each, as `word_runs` makes them."""
        self._texts = [runs for runs in texts if len(runs)]
        self._needed = [math.ceil(EXCLUDED_SHARE * len(runs)) for runs in self._texts]
        sizes = np.array([len(runs) for runs in self._texts], np.int64)
        all_runs = np.concatenate([np.empty(0, np.int64), *self._texts])
        owners = np.repeat(np.arange(len(sizes)), sizes)
        _, which, times = np.unique(all_runs, return_inverse=True, return_counts=True)
        order = np.lexsort((all_runs, times[which], owners))  # text by text, the rarest run first
        place = np.arange(len(all_runs)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        looked_up = order[place <= np.repeat(sizes - np.array(self._needed, np.int64), sizes)]
        looked_up = looked_up[np.argsort(all_runs[looked_up], kind="stable")]
        self._keys, self._owners = all_runs[looked_up], owners[looked_up]

    @classmethod
    def of(cls, sources: Sequence[str], max_reject_rate: float) -> Exclusion:
        """Reads all prompts of the sources.

        Raises:
            EagleError: a source cannot be read, is empty, or too many of its rows are no prompts.
        """
        texts = []
        for source in sources:
            tally = Tally()
            for row in iter_prompts(source):
                tally.draw(source)
                if isinstance(row, Rejected):
                    tally.reject(source, row)
                    continue
                for number, turn in enumerate(row.turns):
                    words = _words(turn)
                    if number == 0 or len(words) >= _WORD_RUN:
                        texts.append(word_runs(words))
            tally.check(
                max_reject_rate,
                finished=True,
                advice=f"--exclude {source} would let them through: give it in a shape that eagle reads, or "
                "raise --max-reject-rate",
            )
        return cls(texts)

    def holds(self, prompt: Prompt) -> bool:
        """Whether the prompt contains one of the texts."""
        if not self._texts:
            return False
        runs = np.unique(np.concatenate([word_runs(_words(turn)) for turn in prompt.turns]))
        return any(
            np.isin(self._texts[text], runs).sum() >= self._needed[text] for text in self._candidates(runs)
        )

    def _candidates(self, runs: _Runs) -> NDArray[np.int64]:
        """The texts of which one of the runs is looked up."""
        first = np.searchsorted(self._keys, runs, "left")
        last = np.searchsorted(self._keys, runs, "right")
        return np.unique(
            np.concatenate(
                [
                    np.empty(0, np.int64),
                    *(self._owners[i:j] for i, j in zip(first, last, strict=True) if i < j),
                ]
            )
        )


def allowed(prompts: Iterable[Prompt], exclusion: Exclusion, tally: Tally) -> Iterator[Prompt]:
    """The prompts that contain no excluded text; the others are counted."""
    for prompt in prompts:
        if exclusion.holds(prompt):
            tally.count(prompt.source, "excluded")
        else:
            yield prompt


def _words(text: str) -> list[str]:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.lower())


def word_runs(words: list[str]) -> _Runs:
    """Hashes of the runs of words in a text, each once; of a text of fewer words one hash of all it says."""
    if len(words) < _WORD_RUN:
        runs = {hash(("whole", *words))} if words else set()
    else:
        runs = {hash(tuple(words[i : i + _WORD_RUN])) for i in range(len(words) - _WORD_RUN + 1)}
    return np.fromiter(runs, np.int64, len(runs))
