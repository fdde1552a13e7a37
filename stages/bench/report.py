"""report.json: its schema, and its making from what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from stages import __version__
from stages.bench.hardware import Hardware
from stages.bench.levels import Sweep
from stages.bench.load import Load
from stages.bench.lossless import Lossless
from stages.bench.metrics import Metrics, metrics
from stages.bench.record import Measured, Output, Record

REPORT_NAME = "report.json"
SCHEMA_NAME = "report.schema.json"
REPORT_VERSION = 2


class PlainRequest(Record):
    """One plain answer; times in seconds."""

    tokens: int
    finish_reason: Literal["stop", "length"]
    ttft_s: float = Field(description="Time to the first token.")
    decode_s: float = Field(description="From there to the end.")


class EagleRequest(PlainRequest):
    """One answer of EAGLE; draft_s and verify_s make up decode_s."""

    draft_s: float
    verify_s: float
    steps: int
    drafted: int
    accepted: int


class RequestReport(Record):
    """One pair of answers. The token ids are in the shards `requests-*.jsonl` beside the report."""

    set: str
    prompt_id: str
    turn: int = Field(description="Turn of the conversation, from 0.")
    prompt_tokens: int
    identical: bool
    plain: PlainRequest
    eagle: EagleRequest


class BenchReport(Record):
    """The whole of report.json."""

    schema_version: int = Field(description="Of this file; grows when a field changes its meaning.")
    eagle_version: str
    hardware: Hardware
    settings: dict[str, Any] = Field(
        description="The flags of the run, with what `auto` and short forms stand for."
    )
    drafter: str = Field(
        default="eagle3", description="What `eagle` stands for in the pairs: a kind of head, or ngram, ..."
    )
    sets: dict[str, Metrics] = Field(
        default_factory=dict, description="Each prompt set under its name, answered one request at a time."
    )
    pooled: Metrics | None = Field(
        default=None, description="All sets as one. Null, like lossless, where only servers were measured."
    )
    by_temperature: dict[str, Metrics] = Field(
        default_factory=dict,
        description="The sets of each temperature as one, where there are several temperatures.",
    )
    set_temperatures: dict[str, float] = Field(
        default_factory=dict, description="Of each set, where there are several temperatures."
    )
    lossless: Lossless | None = Field(default=None, description="Null too with --no-check-lossless.")
    peak_memory: int | None = Field(
        default=None, description="Bytes that the measuring process had resident at most."
    )
    peak_gpu_memory: int | None = Field(
        default=None, description="Bytes that torch had allocated on the GPU at most; null without one."
    )
    sweep: Sweep | None = Field(
        default=None, description="Many requests at once. Null where none was asked for."
    )
    requests: list[RequestReport] = Field(
        default_factory=list, description="The pairs; the answers of a sweep are in `sweep-*.jsonl`."
    )

    @property
    def speedups(self) -> dict[str, float]:
        """What a gate looks at: of each temperature, or of all answers."""
        rows = self.by_temperature or ({} if self.pooled is None else {"": self.pooled})
        return {name: row.speedup for name, row in rows.items()}

    def views(self) -> dict[float, BenchReport]:
        """The report of each temperature alone."""
        found = sorted({*self.set_temperatures.values(), *(load.temperature for load in self._loads())})
        if len(found) < 2:
            return dict.fromkeys(found or [0.0], self)
        return {temperature: self._at(temperature) for temperature in found}

    def _loads(self) -> list[Load]:
        return [] if self.sweep is None else self.sweep.loads

    def _at(self, temperature: float) -> BenchReport:
        sets = {k: v for k, v in self.sets.items() if self.set_temperatures.get(k) == temperature}
        sweep = self.sweep and self.sweep.model_copy(
            update={"levels": [level for level in self.sweep.levels if level.temperature == temperature]}
        )
        return self.model_copy(
            update={
                "sets": sets,
                "pooled": self.by_temperature.get(f"{temperature:g}"),
                "by_temperature": {},
                "set_temperatures": dict.fromkeys(sets, temperature),
                "sweep": sweep,
                "requests": [each for each in self.requests if each.set in sets],
                "settings": self.settings | {"temperature": temperature},
            }
        )

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def schema_file(cls) -> bytes:
        """JSON Schema of the file, with what each field means."""
        return json.dumps(cls.model_json_schema(mode="serialization"), indent=2).encode() + b"\n"


def make_report(
    measured: Sequence[Measured],
    lossless: Lossless | None,
    hardware: Hardware,
    settings: dict[str, Any],
    *,
    drafter: str = "eagle3",
    sweep: Sweep | None = None,
    temperatures: Mapping[str, float] | None = None,
    peaks: tuple[int | None, int | None] = (None, None),
) -> BenchReport:
    """Of records in the order they were measured, which is set by set; none where there was no target.

    Args:
        temperatures: of each set.
        peaks: memory of this process, and on the GPU.
    """
    of_set = dict(temperatures or {})
    several = sorted(set(of_set.values())) if len(set(of_set.values())) > 1 else []
    by_set: dict[str, list[Measured]] = {}
    for record in measured:
        by_set.setdefault(record.set, []).append(record)
    return BenchReport(
        schema_version=REPORT_VERSION,
        eagle_version=__version__,
        hardware=hardware,
        settings=settings,
        drafter=drafter,
        sets={name: metrics(records) for name, records in by_set.items()},
        pooled=metrics(measured) if measured else None,
        by_temperature={
            f"{each:g}": metrics([record for record in measured if of_set[record.set] == each])
            for each in several
        },
        set_temperatures=of_set if several else {},
        peak_memory=peaks[0],
        peak_gpu_memory=peaks[1],
        sweep=sweep,
        lossless=lossless,
        requests=[
            RequestReport(
                set=record.set,
                prompt_id=record.prompt_id,
                turn=request.turn,
                prompt_tokens=len(request.prompt_ids),
                identical=request.plain.token_ids == request.eagle.token_ids,
                plain=PlainRequest(**_plain(request.plain)),
                eagle=EagleRequest(
                    **_plain(request.eagle),
                    draft_s=request.eagle.draft_s,
                    verify_s=request.eagle.verify_s,
                    steps=request.eagle.steps,
                    drafted=request.eagle.drafted,
                    accepted=request.eagle.accepted,
                ),
            )
            for record in measured
            for request in record.requests
        ],
    )


def _plain(output: Output) -> dict[str, Any]:
    return {
        "tokens": output.tokens,
        "finish_reason": output.finish_reason,
        "ttft_s": output.prefill_s,
        "decode_s": output.decode_s,
    }
