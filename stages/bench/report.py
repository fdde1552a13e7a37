"""report.json: its schema, and its making from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from stages import __version__
from stages.bench.hardware import Hardware
from stages.bench.lossless import Lossless
from stages.bench.metrics import Metrics, metrics
from stages.bench.record import Measured, Output, Record

REPORT_NAME = "report.json"
REPORT_VERSION = 1


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
    sets: dict[str, Metrics] = Field(description="Each prompt set under its name.")
    pooled: Metrics = Field(description="All sets as one.")
    lossless: Lossless
    requests: list[RequestReport]

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def make_report(
    measured: Sequence[Measured], lossless: Lossless, hardware: Hardware, settings: dict[str, Any]
) -> BenchReport:
    """Of records in the order they were measured, which is set by set."""
    by_set: dict[str, list[Measured]] = {}
    for record in measured:
        by_set.setdefault(record.set, []).append(record)
    return BenchReport(
        schema_version=REPORT_VERSION,
        eagle_version=__version__,
        hardware=hardware,
        settings=settings,
        sets={name: metrics(records) for name, records in by_set.items()},
        pooled=metrics(measured),
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
