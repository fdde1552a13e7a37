"""transformers' own `generate` as a contestant, plainly or with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from stages.bench.contestant import warm_up_params
from stages.bench.memory import own_gpu_peak, own_peak
from stages.bench.record import Sample, Turn
from stages.bench.workload import Job
from stages.decoding import SamplingParams
from stages.errors import EagleError
from stages.targets import Target

KIND = "transformers"
_LOOKUP = "prompt-lookup"
LOOKUP_TOKENS = 10
"""Drafts of a lookup where none are given, as in transformers' documentation."""


@dataclass(frozen=True)
class GenerateChoice:
    """`transformers`, or `transformers:prompt-lookup` with so many drafts."""

    lookup: int | None = None

    @classmethod
    def parse(cls, text: str) -> GenerateChoice:
        """Raises EagleError: what follows `transformers` is unknown."""
        _, colon, rest = text.partition(":")
        if not colon:
            return cls()
        name, equals, count = rest.partition("=")
        if name != _LOOKUP or (equals and not (count.isdecimal() and int(count))):
            raise EagleError(f"drafter {text!r}: transformers takes {_LOOKUP}, or {_LOOKUP}={LOOKUP_TOKENS}")
        return cls(int(count) if equals else LOOKUP_TOKENS)

    @property
    def name(self) -> str:
        return KIND if self.lookup is None else f"{KIND}:{_LOOKUP}"


@dataclass
class _Arrivals(BaseStreamer):
    """When tokens came, and how many a sequence."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt: bool = True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:  # what is given first is the prompt
            self.prompt = False
            return
        self.times.append(time.perf_counter())
        self.counts.append(value.shape[-1] if value.dim() > 1 else 1)

    def end(self) -> None:
        pass


class Generate:
    """Model and loop of transformers, as a person would call them.

    `generate` knows no requests that join and leave. Plain decoding answers as many as may be under way in
    one padded batch, which ends with its longest answer; prompt lookup takes one at a time, so the others
    wait. Times of an answer in a batch are those of its own tokens.
    """

    def __init__(self, target: Target, model: Any, choice: GenerateChoice) -> None:
        """Args:
        target: whose tokenizer it is, and where.
        model: of transformers, untouched by this package.
        """
        self.name = choice.name
        self._target, self._model, self._lookup = target, model, choice.lookup

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        short = warm_up_params(params)
        self.answer([(number, job) for number in range(concurrency)], concurrency, short)

    def answer(
        self,
        jobs: Sequence[tuple[int, Job]],
        concurrency: int,
        params: SamplingParams,
        due: Sequence[float] | None = None,
    ) -> Turn:
        most = concurrency if self._lookup is None else 1
        samples: list[Sample] = []
        ends: list[float] = []
        begin = time.perf_counter()
        while (done := len(samples)) < len(jobs):
            now = time.perf_counter()
            if due is not None and begin + due[done] > now:
                time.sleep(begin + due[done] - now)
                continue
            batch = [
                place
                for place in range(done, min(done + most, len(jobs)))
                if due is None or begin + due[place] <= now
            ]
            # Without a rate the next is sent when one is answered: with a batch, or while others wait.
            sent = [
                begin + due[place]
                if due is not None
                else now
                if self._lookup is None
                else ends[place - concurrency]
                if place >= concurrency
                else begin
                for place in batch
            ]
            samples += self._batch([jobs[place] for place in batch], sent, params)
            ends.append(time.perf_counter())
        return Turn(
            contestant=self.name,
            concurrency=concurrency,
            duration_s=time.perf_counter() - begin,
            peak_memory=own_peak(),
            peak_gpu_memory=own_gpu_peak(),
            samples=tuple(sorted(samples, key=lambda sample: sample.request)),
        )

    @torch.inference_mode()
    def _batch(
        self, jobs: Sequence[tuple[int, Job]], sent: Sequence[float], params: SamplingParams
    ) -> list[Sample]:
        prompts = [job.prompt_ids for _, job in jobs]
        longest = max(map(len, prompts))
        room = self._target.max_length - longest
        own = [min(job.params(params).max_new_tokens, room) for _, job in jobs]
        config = self._config(max(own), params)
        ids = torch.zeros(len(jobs), longest, dtype=torch.int64)  # [B, T], padded on the left
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen[row, longest - len(prompt) :] = 1
        arrivals = _Arrivals()
        torch.manual_seed(params.seed % 2**63)
        answers = self._model.generate(
            ids.to(self._target.device),
            attention_mask=seen.to(self._target.device),
            generation_config=config,
            streamer=arrivals,
        )[:, longest:].tolist()
        return [
            self._sample(number, len(job.prompt_ids), answer[:most], at, arrivals)
            for (number, job), answer, most, at in zip(jobs, answers, own, sent, strict=True)
        ]

    def _config(self, most: int, params: SamplingParams) -> GenerationConfig:
        ends = sorted(self._target.eos_ids)
        settings: dict[str, Any] = {"max_new_tokens": most, "eos_token_id": ends, "pad_token_id": ends[0]}
        if params.temperature > 0:
            settings |= {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        if self._lookup is not None:
            settings["prompt_lookup_num_tokens"] = self._lookup
        return GenerationConfig(**settings)

    def _sample(
        self, number: int, prompt_tokens: int, answer: list[int], sent: float, arrivals: _Arrivals
    ) -> Sample:
        end = next((i + 1 for i, token in enumerate(answer) if token in self._target.eos_ids), len(answer))
        # The arrivals that brought its own tokens: a batch goes on until its longest answer ends.
        before = [0, *accumulate(arrivals.counts)]
        times = [time for time, begun in zip(arrivals.times, before, strict=False) if begun < end]
        counts = arrivals.counts[: len(times)]
        steps = len(counts) - (counts[0] == 1) if self._lookup is not None else 0
        return Sample(
            request=number,
            prompt_tokens=prompt_tokens,
            output_tokens=end,
            ttft_s=times[0] - sent,
            e2el_s=times[-1] - sent,
            itl_s=tuple(round(b - a, 6) for a, b in pairwise(times)),
            finish_reason="stop" if answer[end - 1] in self._target.eos_ids else "length",
            text=self._target.decode(answer[:end]),
            steps=steps,
            accepted=end - len(counts) if steps else 0,
        )
