"""Whether two runs make the same artifact, and in what they differ."""

from __future__ import annotations

import json
from typing import Any

from stages.artifacts.manifest import Manifest
from stages.artifacts.run_record import RunRecord
from stages.errors import EagleError

_SHOWN = 3
_SHOWN_LENGTH = 60

_MAY_CHANGE = {"batch_size", "served_model"}
"""How fast and by whom, not what: a run that had too little memory continues with a smaller batch."""


def refuse_difference(uri: str, state: str, old: Manifest | RunRecord, wanted: RunRecord) -> None:
    """Refuses to continue or to accept, for `wanted`, what `old` describes.

    Args:
        state: how to call the old one, "a finished" or "an unfinished".

    Raises:
        EagleError: kind, config, parents or target differ; the message names up to three differences.
    """
    if old.kind != wanted.kind:
        raise EagleError(f"{uri} holds {state} {old.kind} artifact, not {wanted.kind}: choose another output")
    found = differences(old, wanted)
    if not found:
        return
    shown = "; ".join(found[:_SHOWN])
    if len(found) > _SHOWN:
        shown += f"; and {len(found) - _SHOWN} more"
    raise EagleError(
        f"{uri} holds {state} {old.kind} artifact made with other settings ({shown}): "
        "use --overwrite to replace it, or choose another output"
    )


def differences(old: Manifest | RunRecord, wanted: RunRecord) -> list[str]:
    """What differs between two runs of a stage, a few words each, such as `seed 0, now 1`.

    Parents are compared by content, so an input that has moved is the same input.
    """
    found = []
    for key in sorted((old.config.keys() | wanted.config.keys()) - _MAY_CHANGE):
        before, now = old.config.get(key), wanted.config.get(key)
        if before != now and key.endswith("_digest"):
            found.append(f"other content of {key.removesuffix('_digest')}")
        elif before != now:
            found.append(f"{key.replace('_', '-')} {_short(before)}, now {_short(now)}")
    inputs = [(parent.kind, parent.digest) for parent in old.parents]
    if inputs != [(parent.kind, parent.digest) for parent in wanted.parents]:
        changed = [parent.uri for parent in wanted.parents if (parent.kind, parent.digest) not in inputs]
        found.append(f"other content of {', '.join(changed)}" if changed else "other inputs")
    if old.target is None or wanted.target is None:
        if old.target != wanted.target:
            found.append("another target")
    elif parts := old.target.mismatch(wanted.target):
        found.append(
            f"target {old.target.name}, now {wanted.target.name}, which differs in {', '.join(parts)}"
        )
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."
