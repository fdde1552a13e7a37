"""The model that is served: its name, its limits, and what it does when a request does not say."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from stages.decoding import SamplingParams
from stages.serve.api import ChatRequest, Model
from stages.serve.api_error import ApiError, shown
from stages.targets import Target

SEED_BITS = 53  # what a JSON number holds exactly in every language


@dataclass(frozen=True)
class ServedModel:
    """The model under the name its clients use, with what it does when a request does not say.

    temperature, top_p, top_k: those of the target's generation config, else OpenAI's (1, 1, off).
    max_length: tokens that a prompt and its answer may have together.
    """

    name: str
    target: Target
    max_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, target: Target, name: str | None = None) -> ServedModel:
        """The target with the defaults of its generation config."""
        config = target.model.generation_config
        return cls(
            name=name or target.name,
            target=target,
            max_length=target.max_length,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=config.top_p or 1.0,
            top_k=config.top_k or 0,
        )

    def unsupported_defaults(self) -> list[str]:
        """Settings of the target's generation config that change its answers elsewhere and not here."""
        config = self.target.model.generation_config
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0}
        values = {name: getattr(config, name, None) for name in neutral}
        return [f"{name}={value}" for name, value in values.items() if value not in (None, neutral[name])]

    def card(self) -> Model:
        """The model as the API lists it."""
        return Model(id=self.name, created=self.created, max_model_len=self.max_length)

    def require_name(self, name: str | None) -> None:
        """Raises ApiError (404) for another model's name; None stands for the one that is served."""
        if name is not None and name != self.name:
            message = f"the model {shown(name)} does not exist; this server has {shown(self.name)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        """How to answer a request.

        Raises:
            ApiError: prompt and answer do not fit into the context.
        """
        room = self.max_length - prompt_tokens
        limit = room if request.token_limit is None else request.token_limit
        if room < 1 or limit > room:
            wanted = f" and {limit} for the answer" if limit > room >= 1 else ""
            message = (
                f"the context is {self.max_length} tokens, and this request takes {prompt_tokens} for the "
                f"messages{wanted}; make it shorter"
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        top_k = self.top_k if request.top_k is None else max(request.top_k, 0)
        return SamplingParams(
            max_new_tokens=limit,
            temperature=self.temperature if request.temperature is None else request.temperature,
            top_p=self.top_p if request.top_p is None else request.top_p,
            top_k=top_k,
            seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
            ignore_eos=bool(request.ignore_eos),
        )
