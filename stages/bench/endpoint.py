"""A server behind an OpenAI-compatible API, asked as any client asks it: streamed chat completions."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from stages.bench.contestant import warm_up_params
from stages.bench.record import Sample, Turn
from stages.bench.workload import Job
from stages.decoding import SamplingParams
from stages.errors import EagleError

KEY_VARIABLE = "OPENAI_API_KEY"
READ_SECONDS = 600.0
# A server's own defaults must not change the answers: some take them from the target's generation config.
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_CONTENT = ("content", "reasoning_content", "reasoning")


class Endpoint:
    """One server. The key, if it wants one, comes from OPENAI_API_KEY and is never written anywhere.

    Attributes:
        model: what it serves, by its own name.
    """

    def __init__(self, name: str, url: str) -> None:
        """Asks the server for its model's name.

        Args:
            url: with or without the `/v1`.

        Raises:
            EagleError: it cannot be reached, or serves no model.
        """
        self.name = name
        self.url = url.rstrip("/")
        if self.url.count("/") <= 2:  # only scheme and host
            self.url += "/v1"
        self._neutral: dict[str, Any] = dict(_NEUTRAL)
        reply = b"".join(self._request("GET", "/models"))
        try:
            self.model = str(json.loads(reply)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EagleError(
                f"endpoint {name} does not say at {self.url}/models which model it serves: give the address "
                "of an OpenAI-compatible API"
            ) from None

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        short = warm_up_params(params)
        try:
            self.answer([(0, job)], 1, short)
        except EagleError:
            if not self._neutral:
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
        begin = time.perf_counter()
        pool = ThreadPoolExecutor(concurrency if due is None else len(jobs), thread_name_prefix=self.name)
        try:
            asked = []
            for place, (number, job) in enumerate(jobs):
                sent = None if due is None else begin + due[place]
                time.sleep(max(0.0, 0.0 if sent is None else sent - time.perf_counter()))
                asked.append(pool.submit(self._ask, number, job, params, sent))
            samples = [each.result() for each in asked]
        finally:
            pool.shutdown(cancel_futures=True)
        return Turn(
            contestant=self.name,
            concurrency=concurrency,
            duration_s=time.perf_counter() - begin,
            samples=tuple(sorted(samples, key=lambda sample: sample.request)),
        )

    def _ask(self, number: int, job: Job, params: SamplingParams, sent: float | None) -> Sample:
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
        reason, usage = "stop", None
        for event in self._events(body):
            now = time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                if piece := "".join(delta.get(name) or "" for name in _CONTENT):
                    arrivals.append(now)
                    text.append(piece)
                reason = choice.get("finish_reason") or reason
        end = time.perf_counter()
        if not usage or "completion_tokens" not in usage or "prompt_tokens" not in usage:
            raise EagleError(
                f"endpoint {self.name} does not report usage in its stream, and tokens cannot be counted "
                "from chunks: turn on stream_options.include_usage there"
            )
        told = usage.get("speculation") or {}  # of our own server
        return Sample(
            request=number,
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            ttft_s=(arrivals[0] if arrivals else end) - sent,
            e2el_s=(arrivals[-1] if arrivals else end) - sent,
            itl_s=tuple(round(b - a, 6) for a, b in pairwise(arrivals)),
            finish_reason=reason,
            text="".join(text),
            ours=bool(told),
            steps=told.get("steps", 0),
            drafted=told.get("drafted", 0),
            accepted=told.get("accepted", 0),
            accepted_per_depth=tuple(told.get("accepted_per_position", ())),
        )

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for line in self._request("POST", "/chat/completions", body):
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise EagleError(
                    f"endpoint {self.name} streamed something else than JSON: {data[:80]!r}"
                ) from None
            if event.get("error"):
                raise EagleError(f"endpoint {self.name} failed: {json.dumps(event['error'])[:300]}")
            yield event

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[bytes]:
        """The reply line by line, each as soon as it is there."""
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with closing(kind(address.hostname or "", address.port, timeout=READ_SECONDS)) as connection:
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, address.path + path, data, headers)
                reply = connection.getresponse()
                if reply.status != 200:
                    said = " ".join(reply.read(2000).decode(errors="replace").split())[:300]
                    raise EagleError(
                        f"endpoint {self.name} answered {reply.status} at {self.url}{path}: {said}"
                    )
                yield from reply
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EagleError(
                f"endpoint {self.name} cannot be used at {self.url}: {reason}: see that the server runs"
            ) from error
