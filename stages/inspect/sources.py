"""What made an artifact, and from which prompts: the leaves of its lineage, as far as its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from stages.artifacts import STAGE_OF_KIND, Kind, Manifest

_NOT_REASONS = ("rows", "read", "kept", "license")


class Source(BaseModel):
    """One source of prompts, or of a converted artifact.

    Attributes:
        rows: how many of its rows are in the artifact; None where the manifest does not say.
        read: how many were read from it; None likewise.
        left_out: how many were not taken, by reason.
        license: "" where the manifest does not say.
    """

    name: str
    rows: int | None = None
    read: int | None = None
    left_out: dict[str, int] = {}
    license: str = ""


def maker(kind: Kind, config: Mapping[str, Any]) -> str:
    """The subcommand that made an artifact."""
    return "convert" if "source_digest" in config else STAGE_OF_KIND[kind]


def sources(manifest: Manifest) -> list[Source]:
    """What the artifact was made from besides its parents."""
    counts, config = manifest.counts, manifest.config
    licenses = _licenses(config.get("source_license"))
    counted = counts.get("sources")
    found: dict[str, Source] = {}
    for name, numbers in counted.items() if isinstance(counted, Mapping) else ():
        found[name] = _counted(name, numbers, licenses)
    prompts = config.get("prompts")
    for given in prompts if isinstance(prompts, list) else ():
        source = _named(given, licenses)
        if source is not None and not _already(source.name, found):
            found[source.name] = source
    if not found and isinstance(converted := counts.get("source"), str):
        found[converted] = Source(name=converted)
    return list(found.values())


def _counted(name: str, numbers: Any, licenses: Mapping[str, str]) -> Source:
    if not isinstance(numbers, Mapping):
        return Source(name=name, rows=_number(numbers), license=licenses.get(name, ""))
    return Source(
        name=name,
        rows=_number(numbers.get("rows", numbers.get("kept"))),
        read=_number(numbers.get("read")),
        left_out={
            key: n for key, n in numbers.items() if key not in _NOT_REASONS and isinstance(n, int) and n
        },
        license=_text(numbers.get("license")) or licenses.get(name, ""),
    )


def _named(given: Any, licenses: Mapping[str, str]) -> Source | None:
    """Of an entry of `config["prompts"]`: gen-data's are names, bench's say how many prompts were taken."""
    if isinstance(given, str):
        return Source(name=given, license=licenses.get(given, ""))
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return Source(
            name=given["name"], rows=_number(given.get("prompts")), license=_text(given.get("license"))
        )
    return None


def _already(name: str, found: Mapping[str, Source]) -> bool:
    """Whether a source is counted already, under its name without the weight that it was given with."""
    return name in found or name.rpartition("=")[0] in found


def _licenses(given: Any) -> dict[str, str]:
    entries = given if isinstance(given, list) else []
    pairs = [each.rpartition("=") for each in entries if isinstance(each, str)]
    return {source: name for source, equals, name in pairs if equals}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else ""
