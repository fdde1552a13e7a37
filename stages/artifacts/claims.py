"""Who may write an unfinished artifact: numbered claims, each made by one process alone.

A claim is a file `_run/<generation>/<number>/claim.json`, created exclusively: of several who try, one
succeeds. Number n+1 is claimed only when the holder of n has stopped. Whoever holds the highest number owns
the artifact, and every holder sees before it commits anything whether there is a higher one. To finish is to
claim once more, so who has been taken over cannot finish. Claims are removed only with their generation,
after the run record that names it.

The holder rewrites its claim every few seconds with a counter. Whether a process of the same machine lives is
asked of the system. Of another's, the counter is watched for longer than it may rest: if it rests, the holder
counts as dead. Only durations on the watcher's own clock matter; nobody's time of day does. A holder that was
taken for dead and was not does no harm: what it still writes is not counted (see `records`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts.folder import RUN_NAME, Folder
from stages.artifacts.manifest import Manifest, canonical_json
from stages.artifacts.process import Process
from stages.artifacts.run_record import generation_of, place_of
from stages.errors import EagleError

BEAT_S = 5.0
"""Seconds from one sign of life to the next."""

WATCH_S = 20.0
"""Seconds without a sign of life after which a writer on another machine counts as dead."""

_LOOK_S = 1.0
_STOP_S = 5.0
_READ_AT_ONCE = 4

_log = logging.getLogger(__name__)


class StillWrittenError(EagleError):
    """Another process is writing the artifact at `uri`."""

    def __init__(self, uri: str, claim: Claim | None) -> None:
        who = f" ({claim.process})" if claim else ""
        super().__init__(
            f"another eagle process{who} is writing {uri}: wait for it, or stop it and run the same command "
            "again"
        )
        self.uri = uri


class Finishing(BaseModel):
    """What is left to do of a run that has begun to finish: write this manifest, remove these files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    drop: tuple[str, ...] = ()


class Claim(BaseModel):
    """`claim.json`.

    Attributes:
        beats: how often the holder has shown that it lives.
        ended: whether it has stopped of itself.
        unsure: whether a holder before may still live: it was only seen not to show life.
        finishing: set from the claim on with which the holder finishes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: Process
    beats: int = 0
    ended: bool = False
    unsure: bool = False
    finishing: Finishing | None = None

    def to_json(self) -> bytes:
        return canonical_json(self.model_dump(mode="json")) + b"\n"


class Ownership:
    """The right to write an artifact, held by showing life in the background until it is given up.

    Attributes:
        number: of the claim, in its generation.
        claim: what it says.
    """

    def __init__(self, folder: Folder, generation: str, number: int, claim: Claim) -> None:
        self.number = number
        self.claim = claim
        self._folder = folder
        self._generation = generation
        self._lock = threading.Lock()
        self._stop = _begin_to_beat(self)

    @classmethod
    def take(cls, folder: Folder, generation: str) -> Ownership:
        """Claims the artifact in `folder`, once it is sure that nobody else is writing it.

        Raises:
            StillWrittenError: another process is writing it.
            EagleError: another process has just finished or removed it.
        """
        while True:
            number, claim = 0, Claim(process=Process.this())
            if (last := last_claim(folder, generation)) is not None:
                number = last[0] + 1
                claim = _claim_after(refuse_living(folder, generation, *last))
            if folder.create(_name(generation, number), claim.to_json()):
                owner = cls(folder, generation, number, claim)
                owner.check()
                return owner

    def check(self) -> None:
        """Refuses to go on when this is no longer the highest claim.

        Raises:
            EagleError: another process has taken over, or removed or finished the artifact.
        """
        if (lost := self._lost()) is not None:
            raise lost

    def advance(self, finishing: Finishing) -> Ownership:
        """The next claim, with which this holder finishes.

        Raises:
            EagleError: another process has taken over, or removed or finished the artifact.
        """
        self._stop()
        claim = self.claim.model_copy(update={"beats": 0, "finishing": finishing})
        made = self._folder.create(_name(self._generation, self.number + 1), claim.to_json())
        if not made:
            raise self._lost() or EagleError(f"cannot claim {self._folder.uri}: run the same command again")
        after = Ownership(self._folder, self._generation, self.number + 1, claim)
        after.check()
        return after

    def forget_finishing(self) -> None:
        """Says that what an earlier run had begun to finish is no longer to be finished."""
        if self.claim.finishing is not None:
            self._rewrite(finishing=None)

    def end(self) -> None:
        """Says that this process writes no more, so that another may at once."""
        self._stop()
        self.check()
        self._rewrite(ended=True)

    def stop(self) -> None:
        """Shows no more life; for when the claims are removed."""
        self._stop()

    def _rewrite(self, **changes: object) -> None:
        with self._lock:
            self.claim = self.claim.model_copy(update=changes)
            self._folder.write(_name(self._generation, self.number), self.claim.to_json())

    def _show_life(self) -> bool:
        """Whether there is still reason to."""
        if self._lost() is not None:
            return False
        self._rewrite(beats=self.claim.beats + 1)
        return True

    def _lost(self) -> EagleError | None:
        after, run = self._folder.read_each([_name(self._generation, self.number + 1), RUN_NAME])
        if after is not None:
            claim = parse_claim(after)
            by = f" ({claim.process})" if claim else ""
            return EagleError(
                f"{self._folder.uri} was taken over by another eagle process{by}: let it finish, "
                "or stop it and run the same command again"
            )
        if run is None or generation_of(run) != self._generation:
            return EagleError(
                f"{self._folder.uri} was finished or removed while this process wrote it: see what is there, "
                "and run the same command again"
            )
        return None


def last_claim(folder: Folder, generation: str) -> tuple[int, bytes] | None:
    """Number and content of the highest claim of an unbroken row from 0, None when there is none."""
    last: tuple[int, bytes] | None = None
    while True:
        first = last[0] + 1 if last else 0
        numbers = range(first, first + _READ_AT_ONCE)
        found = folder.read_each([_name(generation, number) for number in numbers])
        for number, data in zip(numbers, found, strict=True):
            if data is None:
                return last
            last = (number, data)


def refuse_living(folder: Folder, generation: str, number: int, data: bytes) -> Claim | None:
    """Waits until it is sure that the holder of this claim has stopped.

    Returns:
        its claim as it last was, None when that cannot be read.

    Raises:
        StillWrittenError: it writes.
    """
    claim = parse_claim(data)
    lives = None if claim is None else _lives(claim)
    if lives is None:
        who = str(claim.process) if claim else "a process that is not known"
        _log.warning(
            "%s was being written by %s: waiting for up to %.0f s to see whether it still is",
            folder.uri,
            who,
            WATCH_S,
        )
        data, lives = _watched(folder, _name(generation, number), data)
        claim = parse_claim(data)
        lives = lives and not (claim and claim.ended)
    if lives:
        raise StillWrittenError(folder.uri, claim)
    return claim


def _lives(claim: Claim) -> bool | None:
    return False if claim.ended or claim.process.is_this() else claim.process.runs()


def _claim_after(before: Claim | None) -> Claim:
    if before is None:
        return Claim(process=Process.this(), unsure=True)
    unsure = before.unsure or _lives(before) is None
    return Claim(process=Process.this(), unsure=unsure, finishing=before.finishing)


def _watched(folder: Folder, name: str, data: bytes) -> tuple[bytes, bool]:
    """The claim after a while, and whether it changed."""
    began = time.monotonic()
    while (left := began + WATCH_S - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left))
        now = folder.read(name)
        if now != data:
            return now or data, now is not None
    return data, False


def _begin_to_beat(ownership: Ownership) -> Callable[[], object]:
    """Starts the thread; what is returned, or the end of the ownership, ends it."""
    stopped = threading.Event()
    thread = threading.Thread(
        target=_beats, args=(weakref.ref(ownership), stopped), name="eagle-claim", daemon=True
    )
    thread.start()

    def stop() -> None:
        stopped.set()
        if thread is not threading.current_thread():
            thread.join(_STOP_S)

    return weakref.finalize(ownership, stop)


def _beats(owner: weakref.ref[Ownership], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        ownership = owner()
        if ownership is None:
            return
        try:
            if not ownership._show_life():
                return
        except EagleError as error:
            _log.warning("cannot show that this process still writes: %s", error)
        del ownership


def _name(generation: str, number: int) -> str:
    return f"{place_of(generation, number)}/claim.json"


def parse_claim(data: bytes) -> Claim | None:
    """None for what was cut off or is no claim of this eagle."""
    try:
        return Claim.model_validate_json(data)
    except ValidationError:
        return None
