"""A server behind an OpenAI-compatible API, asked as any client asks it: streamed chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from stages.bench.contestant import warm_up_params
from stages.bench.record import Sample, Turn
from stages.bench.reply import RefusedError, Replies
from stages.bench.workload import Job
from stages.decoding import SamplingParams
from stages.errors import EagleError

PATIENCE_SECONDS = 600.0
_ASK_SECONDS = 30.0
"""For the name of a model, which takes no computing."""
# A server's own defaults must not change the answers: some take them from the target's generation config.
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_UNKNOWN_FIELD = (400, 422)


class _Speculation(BaseModel):
    """What our own server tells of drafting."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()


class _Usage(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0)
    completion_tokens: int | None = Field(None, ge=0)
    speculation: _Speculation | None = None


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return "".join(each or "" for each in (self.content, self.reasoning_content, self.reasoning))


class _Choice(BaseModel):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(BaseModel):
    """One piece of a streamed answer, as far as it counts here."""

    error: Any = None
    choices: tuple[_Choice, ...] | None = None
    usage: _Usage | None = None


_DONE = _Event(choices=(_Choice(finish_reason="stop"),))
"""Of a server that gives no other reason."""


class Endpoint:
    """One server.

    Attributes:
        model: what it serves, by its own name.
    """

    def __init__(self, name: str, url: str, patience: float = PATIENCE_SECONDS) -> None:
        """Asks the server for its model's name.

        Args:
            url: with or without the `/v1`; `#MODEL` behind it says which of several models.
            patience: seconds without a token after which an answer counts as hung.

        Raises:
            EagleError: it cannot be reached, or does not serve the model, or none.
        """
        self.name, self._patience = name, patience
        url, _, wanted = url.partition("#")
        self.url = url.rstrip("/")
        if self.url.count("/") <= 2:  # only scheme and host
            self.url += "/v1"
        self._neutral: dict[str, Any] = dict(_NEUTRAL)
        self.model = self._serves(wanted)

    def _serves(self, wanted: str) -> str:
        replies = Replies(self.name, self.url)
        reply = b"".join(replies.lines("GET", "/models", patience=min(self._patience, _ASK_SECONDS)))
        try:
            models = [str(each["id"]) for each in json.loads(reply)["data"]]
            first = models[0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise EagleError(
                f"endpoint {self.name} does not say at {self.url}/models which model it serves: give the "
                "address of an OpenAI-compatible API"
            ) from None
        if wanted and wanted not in models:
            raise EagleError(
                f"endpoint {self.name} at {self.url} has no model {wanted}: it serves {', '.join(models)}"
            )
        return wanted or first

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        short = warm_up_params(params)
        try:
            self.answer([(0, job)], 1, short)
        except RefusedError as error:
            if error.status not in _UNKNOWN_FIELD or not self._neutral:
                raise
            self._neutral = {}  # it may take OpenAI's own fields only
        self.answer([(0, job)] * concurrency, concurrency, short)

    def answer(
        self,
        jobs: Sequence[tuple[int, Job]],
        concurrency: int,
        params: SamplingParams,
        due: Sequence[float] | None = None,
    ) -> Turn:
        begin, replies = time.perf_counter(), Replies(self.name, self.url)
        pool = ThreadPoolExecutor(concurrency if due is None else len(jobs), thread_name_prefix=self.name)
        try:
            asked = []
            for place, (number, job) in enumerate(jobs):
                sent = None if due is None else begin + due[place]
                time.sleep(max(0.0, 0.0 if sent is None else sent - time.perf_counter()))
                asked.append(pool.submit(self._ask, replies, number, job, job.params(params), sent))
            wait(asked, return_when=FIRST_EXCEPTION)
            failed = [each for each in asked if each.done() and each.exception() is not None]
            samples = [each.result() for each in failed or asked]
        except BaseException:
            replies.abandon()  # or the threads would wait for a server that hangs
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        if not any(sample.output_tokens for sample in samples):
            raise EagleError(f"endpoint {self.name} answered {len(samples)} requests without a single token")
        return Turn(
            contestant=self.name,
            concurrency=concurrency,
            duration_s=time.perf_counter() - begin,
            samples=tuple(sorted(samples, key=lambda sample: sample.request)),
        )

    def _ask(
        self, replies: Replies, number: int, job: Job, params: SamplingParams, sent: float | None
    ) -> Sample:
        body = {
            "model": self.model,
            "messages": job.messages,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._neutral,
        }
        sent = sent or time.perf_counter()
        arrivals: list[float] = []
        text: list[str] = []
        reason: str | None = None
        usage: _Usage | None = None
        most = 2 * params.max_new_tokens + 64  # whatever a server takes for a token
        last = time.perf_counter()
        for event in self._events(replies, body):
            now = time.perf_counter()
            if now - last > self._patience:
                raise EagleError(
                    f"endpoint {self.name} hangs: no token came for {self._patience:g} s, though its stream "
                    "goes on"
                )
            if event is None:
                continue
            usage = event.usage or usage
            for choice in event.choices or ():
                if choice.delta is not None and choice.delta.text:
                    arrivals.append(now)
                    text.append(choice.delta.text)
                    last = now
                reason = reason or choice.finish_reason
            if max(len(arrivals), (usage and usage.completion_tokens) or 0) > most:
                raise EagleError(
                    f"endpoint {self.name} goes on behind the {params.max_new_tokens} tokens asked for: it "
                    "does not keep to max_tokens"
                )
        end = time.perf_counter()
        if usage is None and reason is None:
            raise EagleError(
                f"endpoint {self.name} broke off in the middle of an answer, after {len(arrivals)} pieces"
            )
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            raise EagleError(
                f"endpoint {self.name} does not report usage in its stream, and tokens cannot be counted "
                "from chunks: turn on stream_options.include_usage there"
            )
        told = usage.speculation or _Speculation()
        return Sample(
            request=number,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            ttft_s=(arrivals[0] if arrivals else end) - sent,
            e2el_s=(arrivals[-1] if arrivals else end) - sent,
            itl_s=tuple(round(b - a, 6) for a, b in pairwise(arrivals)),
            finish_reason=reason or "stop",
            text="".join(text),
            ours=usage.speculation is not None,
            steps=told.steps,
            drafted=told.drafted,
            accepted=told.accepted,
            accepted_per_depth=told.accepted_per_position,
        )

    def _events(self, replies: Replies, body: dict[str, Any]) -> Iterator[_Event | None]:
        """Pieces of the answer; None for lines that are none, as the comments that keep a stream alive."""
        for line in replies.lines("POST", "/chat/completions", body, patience=self._patience):
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                yield _DONE if data == b"[DONE]" else None
                continue
            try:
                event = _Event.model_validate_json(data)
            except ValidationError:
                raise EagleError(
                    f"endpoint {self.name} streamed something else than chunks of a chat completion: "
                    f"{data[:80]!r}"
                ) from None
            if event.error:
                raise EagleError(f"endpoint {self.name} failed: {json.dumps(event.error)[:300]}")
            yield event
