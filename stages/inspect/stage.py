"""Artifact -> what a person wants to know of it: find it, check it, follow its lineage, read some rows."""

from __future__ import annotations

from stages.config import several
from stages.errors import EagleError
from stages.inspect.bench_report import bench_report
from stages.inspect.config import InspectConfig
from stages.inspect.lineage import lineage
from stages.inspect.place import Place, look
from stages.inspect.result import Checked, InspectResult, PartFound, Rows, WriterFound
from stages.inspect.selection import Selection
from stages.inspect.sources import maker, sources
from stages.inspect.training_log import training_log
from stages.inspect.verification import check_digests, check_sizes
from stages.progress import Reporter

NAMED = 3
"""Faults that the error line names; the page has all."""


def run(config: InspectConfig, report: Reporter) -> InspectResult:
    """Raises EagleError: no artifact is there, or no such rows; or, with the result, its files are not what
    they should be."""
    place = look(config.uri)
    faults = check_digests(place, report) if config.verify else check_sizes(place)
    selection = Selection.of(config)
    shown = None
    try:
        if not selection.empty:
            shown = read_rows(place, selection, config.target)
    except EagleError:
        if not faults:  # else they are why, and all of them are shown
            raise
    checked = Checked(
        digests=config.verify,
        files=len(place.entries),
        bytes=sum(entry.bytes for entry in place.entries),
        faults=faults,
    )
    result = describe(place, checked, shown)
    if faults:
        raise EagleError(_damage(result), result=result)
    return result


def read_rows(place: Place, selection: Selection, target: str | None) -> Rows:
    """The rows to show; imports what their kind needs.

    Raises:
        EagleError: there are no such rows, or they cannot be read.
    """
    kind = place.manifest.kind
    if kind == "conversations":
        from stages.inspect.conversation_rows import conversation_rows

        conversations, note = conversation_rows(place, selection, target)
        return Rows(note=note, rows=list(conversations))
    if kind == "features":
        from stages.inspect.feature_rows import feature_rows

        features, note = feature_rows(place, selection)
        return Rows(note=note, rows=list(features))
    if place.state != "complete":
        raise EagleError(
            f"{place.uri} is an unfinished {kind}: there is nothing to show of it before its end"
        )
    read = training_log if kind == "head" else bench_report
    totals, lines, note = read(place, selection)
    return Rows(note=note, totals=totals, rows=list(lines))


def describe(place: Place, checked: Checked, shown: Rows | None) -> InspectResult:
    """Everything about the artifact; follows its lineage."""
    manifest = place.manifest
    return InspectResult(
        uri=place.uri,
        state=place.state,
        kind=manifest.kind,
        schema_version=manifest.schema_version,
        tool_version=manifest.tool_version,
        created=manifest.created,
        digest=manifest.digest if place.state == "complete" else "",
        rows=sum(shard.rows for shard in manifest.shards),
        bytes=checked.bytes,
        counts=dict(manifest.counts),
        config=manifest.config,
        target=manifest.target,
        shards=list(manifest.shards),
        files=list(manifest.files),
        parents=lineage(place.uri, manifest),
        sources=sources(manifest),
        writer=_writer(place),
        parts=[PartFound(**vars(part)) for part in place.parts],
        checked=checked,
        shown=shown,
    )


def _writer(place: Place) -> WriterFound | None:
    if (process := place.writer) is None:
        return None
    return WriterFound(host=process.host, pid=process.pid, alive=process.runs())


def _damage(result: InspectResult) -> str:
    faults = result.checked.faults
    named = "; ".join(f"{fault.path} {fault.problem}" for fault in faults[:NAMED])
    more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    again = f"the eagle {maker(result.kind, result.config)} command that made it again"
    repair = f"run {again}{' with --overwrite' if result.state == 'complete' else ''}"
    files = several(result.checked.files, "file")
    return f"not as written: {len(faults)} of {files} of {result.uri} ({named}{more}): {repair}"
