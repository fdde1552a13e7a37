"""What `/metrics` shows, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stages.decoding import DecodeStats
from stages.serve.engine_thread import EngineThread

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms of one server; nothing is shared between two in one process."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"eagle_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"eagle_{name}_seconds", text, buckets=buckets, registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"eagle_{name}", text, registry=self._registry)

        self._requests = counter("requests", "Requests that ended, by how.", "outcome")
        self._answers = counter("answers", "Complete answers, by why they ended.", "finish_reason")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of the prompts taken on.")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts that were not read again.")
        self._tokens = counter("generated_tokens", "Tokens of the answers.")
        self._steps = counter("decode_steps", "Steps of all answers: one forward of the target each.")
        self._drafted = counter("drafted_tokens", "Draft tokens verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted.")
        self._positions = counter(
            "accepted_tokens_per_position", "Draft tokens accepted, by place in their step.", "position"
        )
        self._ttft = histogram("time_to_first_token", "From request to first token.", TTFT_BUCKETS)
        self._tpot = histogram("time_per_output_token", "Mean of an answer, after its first.", TPOT_BUCKETS)
        self._seconds = histogram("request", "From request to end, of complete ones.", SECONDS_BUCKETS)
        gauge("answers_running", "Answers being decoded.").set_function(lambda: engine.running)
        gauge("answers_waiting", "Answers in the queue.").set_function(lambda: engine.waiting)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def refused(self) -> None:
        """A request was turned away before the engine took it."""
        self._requests.labels("refused").inc()

    def ended(self, outcome: str, seconds: float) -> None:
        """A request has ended: complete, cancelled, stopped or failed."""
        self._requests.labels(outcome).inc()
        if outcome == "complete":
            self._seconds.observe(seconds)

    def answered(self, finish_reason: str, tpot_s: float | None) -> None:
        """An answer is complete."""
        self._answers.labels(finish_reason).inc()
        if tpot_s is not None:
            self._tpot.observe(tpot_s)

    def prompts(self, tokens: int) -> None:
        """The engine takes on prompts."""
        self._prompt_tokens.inc(tokens)

    def first_token(self, seconds: float, cached: int) -> None:
        """An answer has begun, to a prompt of which so many tokens were kept from earlier ones."""
        self._ttft.observe(seconds)
        self._cached.inc(cached)

    def cycle(self, tokens: int, before: DecodeStats, after: DecodeStats) -> None:
        """A cycle has given an answer `tokens`, and changed its counts."""
        self._tokens.inc(tokens)
        self._steps.inc(after.steps - before.steps)
        self._drafted.inc(after.drafted - before.drafted)
        self._accepted.inc(after.accepted - before.accepted)
        earlier = before.accepted_per_depth
        for i, count in enumerate(after.accepted_per_depth):
            if more := count - (earlier[i] if i < len(earlier) else 0):
                self._positions.labels(i + 1).inc(more)
