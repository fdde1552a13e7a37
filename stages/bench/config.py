"""What `eagle bench` can be told."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from stages.config import ArtifactReaderConfig, ChatTemplateConfig, CommonConfig, number_list

_LARGEST = 2**31 - 1
TOGETHER = 8
"""Requests that are answered together where only a rate is given, as by eagle serve."""

DRAFTERS = (
    "none, ngram, medusa, eagle1, eagle3, draft:MODEL, oracle:P, transformers, transformers:prompt-lookup"
)
"""All that --drafters can name, for its help and its errors."""


class BenchConfig(ChatTemplateConfig, ArtifactReaderConfig, CommonConfig):
    """One field is one flag; the description is its help text.

    Which fields are needed depends on what is measured, so none is required by itself; "" is not given.
    """

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is measured": (
            "target",
            "head",
            "drafters",
            "endpoint",
            "launch",
            "timeout",
            "prompts",
            "output",
        ),
        "Answers": ("num_prompts", "prompt_lengths", "max_new_tokens", "temperature", "seed", "tree"),
        "Many requests at once": ("concurrency", "request_rate", "repeat"),
        "Losslessness": ("check_lossless", "check_float32", "near_tie_gap"),
        "Verdicts": ("compare", "fail_below"),
        "Parity with training": ("parity", "parity_rows", "trained_on"),
    }

    target: str = Field(
        default="",
        description="The model that answers: Hugging Face id, local folder, .gguf file or builtin:smollm2.",
    )
    head: list[str] = Field(
        default_factory=list,
        description="URI of a draft head that eagle train wrote for this target. May be given several times, "
        "to compare heads.",
    )
    drafters: str = Field(
        default="",
        description=f"What is compared, separated by commas: {DRAFTERS}. The kinds of heads need their "
        "--head; oracle:P knows the answer and is right with chance P; the last two are transformers' own "
        "generate. Default: plain decoding and every head.",
    )
    endpoint: list[str] = Field(
        default_factory=list,
        description="NAME=URL of an OpenAI-compatible server to measure with the same prompts, such as "
        "vllm=http://localhost:8000/v1; #MODEL behind it says which model, where there are several. May be "
        "given several times; works without a target too.",
    )
    launch: list[str] = Field(
        default_factory=list,
        description="NAME=KIND[:OPTIONS]: a server to start on this machine, measure like an endpoint, and "
        "stop. KIND is eagle, vllm, sglang or llama-server; OPTIONS, separated by commas, are head (the "
        "first --head) or head=URI, chain=N, python=PATH, bin=PATH, dtype=D, wait=SECONDS (to start), and "
        "last args=FLAGS. May be given several times.",
    )
    timeout: float = Field(
        default=600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Seconds without a token after which an answer of a server counts as hung, and the run "
        "ends.",
    )
    prompts: list[str] = Field(
        default_factory=list,
        description="A prompt set: builtin:eval, a local or remote .jsonl or .parquet file, or a Hugging "
        "Face data set id. May be given several times; each is reported by itself, and all pooled.",
    )
    output: str = Field(default="", description="URI of the report to write.")
    max_new_tokens: str = Field(
        default="128",
        description="Longest answer, in tokens; longer ones are cut. Several, such as 32,128, are measured "
        "as sets of their own.",
    )
    prompt_lengths: str = Field(
        default="",
        description="Tokens at which each set is parted by the length of its prompts: 64,256 makes three, up "
        "to 64 tokens, up to 256, and longer. Needs a target.",
    )
    num_prompts: int | None = Field(
        default=None, ge=1, description="Prompts to take from the start of each set. Default: all there are."
    )
    temperature: str = Field(
        default="0",
        description="Randomness of the answers; 0 is greedy. Several, such as 0,1, are measured and reported "
        "apart.",
    )
    seed: int = Field(default=0, description="Seed of the answers.")
    tree: list[str] = Field(
        default=["cost"],
        description="Draft tree: cost (what pays on this machine), none, chain:depth=3, "
        "dynamic:depth=6,width=4,nodes=12, best:nodes=12 or static:0,1,0.0. May be given several times: "
        "every drafter with each.",
    )
    concurrency: str = Field(
        default="",
        description="Also answer that many requests at once, such as 1,4,8: every drafter and endpoint in "
        "turns.",
    )
    request_rate: str = Field(
        default="inf",
        description="Requests a second, such as 0.5,1,2, that come whether or not those before are answered, "
        "at random (Poisson, by --seed); --concurrency is then how many the engines here answer together. "
        "inf: the next request comes when one is answered.",
    )
    repeat: int = Field(
        default=1, ge=1, description="How often all requests are answered at each concurrency."
    )
    check_lossless: bool = Field(
        default=True,
        description="Compare every answer with plain decoding's, explain each difference, and fail at a "
        "fault. Without it the target is not loaded in float32.",
    )
    check_float32: int = Field(
        default=4,
        ge=0,
        description="Prompts, spread over all sets, that are answered once more in float32, where both "
        "outputs must be identical; 0 for none.",
    )
    near_tie_gap: float = Field(
        default=0.5,
        ge=0.0,
        allow_inf_nan=False,
        description="In bfloat16 the outputs may part where the float32 logits of the two tokens are less "
        "than this below the highest one.",
    )
    compare: tuple[str, str] | None = Field(
        default=None,
        description="Instead of measuring, show what changed from one report to another: two URIs, the older "
        "first.",
    )
    fail_below: float | None = Field(
        default=None,
        gt=0.0,
        allow_inf_nan=False,
        description="Fail, after the report, if the speed-up over plain decoding is below this; with "
        "--compare, that of the second report.",
    )
    parity: bool = Field(
        default=False,
        description="Instead of answering prompts, replay held-out conversations of the head's training as "
        "they are served, and fail if logits or tokens a step are not those that training predicts.",
    )
    parity_rows: int = Field(default=16, ge=1, description="Conversations to replay, at most.")
    trained_on: list[str] = Field(
        default_factory=list,
        description="URI of the features, or conversations, that the head was trained on, if they are no "
        "longer where they were; of several each, in the same order.",
    )

    @field_validator("head", "tree", "trained_on", mode="before")
    @classmethod
    def _one(cls, given: object) -> object:
        return [given] if isinstance(given, str) else given

    @field_validator("tree")
    @classmethod
    def _some_tree(cls, given: list[str]) -> list[str]:
        if not given or len(set(given)) < len(given):
            raise ValueError("give at least one tree, and each once")
        return given

    @field_validator("temperature", "request_rate", "max_new_tokens", "prompt_lengths", mode="before")
    @classmethod
    def _numbers_are_text(cls, given: object) -> object:
        return str(given) if isinstance(given, int | float) else given

    @field_validator("temperature")
    @classmethod
    def _temperatures(cls, given: str) -> str:
        return number_list(given, "give numbers from 0 on, separated by commas, such as 0,1", least=0.0)

    @field_validator("request_rate")
    @classmethod
    def _rates(cls, given: str) -> str:
        wanted = "give requests a second, separated by commas, such as 0.5,1,2, or inf"
        return number_list(given, wanted, least=1e-6, most=math.inf)

    @field_validator("concurrency", "max_new_tokens", "prompt_lengths")
    @classmethod
    def _ascending(cls, given: str, info: ValidationInfo) -> str:
        parts = [part.strip() for part in given.split(",") if part.strip()]
        numbers = sorted({int(part) for part in parts if part.isdecimal()})
        least = 1 if info.field_name == "max_new_tokens" else 0  # so many of them
        if not all(part.isdecimal() for part in parts) or numbers[:1] == [0] or len(numbers) < least:
            raise ValueError("give numbers from 1 on, separated by commas, such as 1,4,8")
        if numbers and numbers[-1] > _LARGEST:
            raise ValueError(f"is too large: at most {_LARGEST}")
        return ",".join(map(str, numbers))

    @field_validator("endpoint")
    @classmethod
    def _named(cls, given: list[str]) -> list[str]:
        for each in given:
            name, equals, url = each.partition("=")
            if not (name and equals and url.startswith(("http://", "https://"))):
                raise ValueError("give NAME=URL, such as vllm=http://localhost:8000/v1")
        return given

    @model_validator(mode="after")
    def _all_there(self) -> BenchConfig:
        if self.compare is not None:
            return self
        names = [each.partition("=")[0] for each in (*self.endpoint, *self.launch)]
        if len(set(names)) < len(names):
            raise ValueError("give every endpoint and every launched server a name of its own")
        needs: dict[str, object] = {"--target": self.target, "--head": self.head or self.drafters}
        if self.launch and not self.in_process:
            needs = {"--target": self.target}
        elif self.endpoint and not (self.target or self.in_process):
            needs = {}
        missing = [flag for flag, given in (needs | {"--output": self.output}).items() if not given]
        if missing:
            raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        if self.prompt_lengths and not self.target:
            raise ValueError("--prompt-lengths needs a --target, whose tokens are counted")
        if self.parity == bool(self.prompts):
            raise ValueError("give either --prompts to answer, or --parity")
        if self.trained_on and not self.parity:
            raise ValueError("--trained-on is for --parity")
        if self.parity and len(self.head) != 1:
            raise ValueError("--parity takes one --head")
        if self.fail_below is not None and not (self.target and self.in_process):
            raise ValueError("--fail-below needs a --target, whose plain decoding is what is compared with")
        if any(rate is not None for rate in self.rates) and len(self.levels) > 1:
            raise ValueError("with --request-rate give one --concurrency: how many are answered together")
        return self

    @property
    def in_process(self) -> bool:
        """Whether the target decodes in this process, plainly and with drafters."""
        return bool(self.head or self.drafters)

    @property
    def answer_lengths(self) -> tuple[int, ...]:
        """Longest answers to measure, ascending."""
        return tuple(int(part) for part in self.max_new_tokens.split(","))

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(float(part) for part in self.temperature.split(","))

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Requests a second; None: the next one comes when one is answered."""
        rates = (float(part) for part in self.request_rate.split(","))
        return tuple(None if math.isinf(rate) else rate for rate in rates)

    @property
    def levels(self) -> tuple[int, ...]:
        """The concurrencies to measure; empty where only one request at a time is asked for, as always."""
        if self.concurrency:
            return tuple(int(part) for part in self.concurrency.split(","))
        if any(rate is not None for rate in self.rates):
            return (TOGETHER,)
        return (1,) if self.sweeps else ()

    @property
    def sweeps(self) -> bool:
        """Whether more than plain decoding and one drafter, one request at a time, is measured."""
        return bool(
            self.concurrency
            or self.drafters
            or self.endpoint
            or self.launch
            or self.repeat > 1
            or len(self.head) > 1
            or len(self.tree) > 1
        )
