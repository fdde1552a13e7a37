"""Text of which some tokens are the target's own: coloured, or in brackets where there is no colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stages.inspect.text import Segment, printable

SAMPLED = "green"
OPENS, CLOSES = "\u27e6", "\u27e7"


class SampledText:
    """The tokens of a row."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments

    @classmethod
    def of_ids(cls, ids: Sequence[int], loss_mask: Sequence[int]) -> SampledText:
        """The ids as numbers, where no tokenizer is to be had."""
        pairs = groupby(zip(ids, loss_mask, strict=True), key=lambda pair: bool(pair[1]))
        runs = [(sampled, [str(token) for token, _ in run]) for sampled, run in pairs]
        return cls([Segment(text=" ".join(run) + " ", supervised=sampled) for sampled, run in runs])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = has_colour(console)
        text = Text()
        for segment in self._segments:
            piece = printable(segment.text)
            if not segment.supervised:
                text.append(piece)
            elif coloured:
                text.append(piece, style=SAMPLED)
            else:
                text.append(f"{OPENS}{piece}{CLOSES}")
        yield text


class Legend:
    """Says how the target's own tokens are marked, and whose tokenizer gave the text."""

    def __init__(self, note: str) -> None:
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(f"{printable(self._note)}; sampled by the target: ")
        if has_colour(console):
            yield text.append("coloured", style=SAMPLED)
        else:
            yield text.append(f"{OPENS}in brackets{CLOSES}")


def has_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color
