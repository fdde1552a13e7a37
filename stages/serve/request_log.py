"""One line a request, for people or for programs; never any text of the user's."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Literal

from stages.serve.api_error import ApiError
from stages.serve.completion import Completion

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class RequestRecord:
    """What became of a request that the engine took.

    id: of the reply; `request_id` is the one that the client gave, or else got.
    outcome: why its answers ended, or what kept them from ending.
    ttft_s, tpot_s: seconds to the first token, and of each after it; None without.
    """

    id: str
    request_id: str
    outcome: str
    answers: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    ttft_s: float | None
    tpot_s: float | None
    steps: int
    drafted: int
    accepted: int
    accepted_per_step: float | None

    @classmethod
    def of(cls, reply_id: str, request_id: str, outcome: str, completion: Completion) -> RequestRecord:
        usage = completion.usage
        spec = usage.speculation
        first = [c.ttft_s for c in completion.choices if c.ttft_s is not None]
        each = [c.tpot_s for c in completion.choices if c.tpot_s is not None]
        return cls(
            id=reply_id,
            request_id=request_id,
            outcome=outcome,
            answers=len(completion.choices),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            seconds=round(completion.seconds, 4),
            ttft_s=round(min(first), 4) if first else None,
            tpot_s=round(fmean(each), 5) if each else None,
            steps=spec.steps,
            drafted=spec.drafted,
            accepted=spec.accepted,
            accepted_per_step=spec.accepted_per_step,
        )

    def text(self) -> str:
        """The line for people."""
        parts = [f"{self.prompt_tokens}+{self.completion_tokens} tokens"]
        if self.answers > 1:
            parts.insert(0, f"{self.answers} answers")
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s:.2f} s")
        if self.tpot_s:
            parts.append(f"TPOT {self.tpot_s * 1000:.1f} ms ({1 / self.tpot_s:.1f} tok/s)")
        if self.drafted:
            parts.append(f"{self.accepted_per_step:.2f} accepted/step")
        return f"{self.request_id} {self.outcome}: {', '.join(parts)}"


class RequestLog:
    """Writes the lines.

    Args:
        write: takes one line.
    """

    def __init__(self, write: Callable[[str], None], form: LogFormat = "text") -> None:
        self._write = write
        self._json = form == "json"

    def ended(self, record: RequestRecord) -> None:
        """A request that the engine took has ended."""
        self._line(asdict(record), record.text())

    def refused(self, error: ApiError, request_id: str) -> None:
        """A request was answered by an error before the engine took it."""
        code = error.code or error.kind
        self._line(
            {"request_id": request_id, "outcome": "refused", "status": error.status, "code": code},
            f"{request_id} refused: {error.status} {code}",
        )

    def failed(self, error: BaseException, request_id: str) -> None:
        """Shows where the server itself went wrong."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._line(
            {"request_id": request_id, "outcome": "error", "traceback": trace},
            f"{request_id} error: {trace}",
        )

    def _line(self, fields: dict[str, Any], text: str) -> None:
        if self._json:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            text = json.dumps({"time": time, **fields})
        self._write(text)
