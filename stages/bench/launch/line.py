"""One `--launch NAME=KIND[:OPTIONS]`, taken apart."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stages.errors import EagleError

ServerKind = Literal["eagle", "vllm", "sglang", "llama-server"]
_OPTIONS: dict[str, tuple[str, ...]] = {
    "eagle": ("head", "chain", "python", "dtype", "wait", "args"),
    "vllm": ("head", "chain", "python", "dtype", "wait", "args"),
    "sglang": ("head", "chain", "python", "dtype", "wait", "args"),
    "llama-server": ("bin", "wait", "args"),
}
SECONDS_TO_START = 900.0
CHAIN = 3
"""Drafts of a chain where none is given, for vLLM and SGLang."""


@dataclass(frozen=True)
class LaunchLine:
    """What to start.

    head: URI of its draft head; None decodes plainly.
    chain: drafts of a chain; None is the engine's own default.
    python, binary: whose packages, or which program, to run; None finds them.
    wait: seconds until it must be healthy.
    flags: given to the server as they are.
    """

    name: str
    kind: ServerKind
    head: str | None = None
    chain: int | None = None
    python: str | None = None
    binary: str | None = None
    dtype: str | None = None
    wait: float = SECONDS_TO_START
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, heads: Sequence[str]) -> LaunchLine:
        """`vllm=vllm:head,chain=2,args=--enforce-eager` and the like.

        Args:
            heads: those of the run; `head` alone is the first.

        Raises:
            EagleError: the kind is unknown, or it has no such option.
        """
        name, equals, rest = text.partition("=")
        kind, _, options = rest.partition(":")
        if not (name and equals) or kind not in get_args(ServerKind):
            raise EagleError(
                f"--launch {text}: give NAME=KIND[:OPTIONS], where KIND is {', '.join(get_args(ServerKind))}"
            )
        values = _options(options)
        for key in values:
            if key not in _OPTIONS[kind]:
                raise EagleError(
                    f"--launch {text}: {kind} takes {', '.join(_OPTIONS[kind])}, and not {key!r}"
                )
        head, chain = values.get("head"), values.get("chain")
        if head == "":
            if not heads:
                raise EagleError(f"--launch {text}: there is no --head that it could take; give head=URI")
            head = heads[0]
        if chain is not None and (head is None or not chain.isdecimal() or not int(chain)):
            raise EagleError(f"--launch {text}: chain is a number from 1 on, and goes with head")
        return cls(
            name,
            kind,  # type: ignore[arg-type]
            head,
            None if chain is None else int(chain),
            values.get("python"),
            values.get("bin"),
            values.get("dtype"),
            _seconds(text, values.get("wait", f"{SECONDS_TO_START:g}")),
            tuple(shlex.split(values.get("args", ""))),
        )


def _seconds(text: str, given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise EagleError(f"--launch {text}: wait is a number of seconds, such as wait=1800")
    return seconds


def _options(text: str) -> dict[str, str]:
    """By key; a bare word has an empty value, and what follows `args=` is all of it."""
    before, found, flags = f",{text}".partition(",args=")
    pairs = (part.partition("=") for part in before.split(",") if part)
    return {key: value for key, _, value in pairs} | ({"args": flags} if found else {})
