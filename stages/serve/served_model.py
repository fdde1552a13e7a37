"""The model that is served: its name, its limits, and what it does when a request does not say."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stages.decoding import SamplingParams
from stages.decoding.sampling import TokenMask
from stages.errors import EagleError
from stages.serve.api_error import ApiError, shown
from stages.serve.request import AnswerRequest
from stages.serve.response import Model
from stages.serve.token_rules import TokenRules
from stages.serve.token_text import TokenTexts
from stages.serve.tool_form import ToolForm, tool_form
from stages.targets import Target
from stages.targets.chat_template import template_variables

SEED_BITS = 53  # what a JSON number holds exactly in every language


@dataclass(frozen=True)
class ServedModel:
    """The model under the name its clients use, with what it does when a request does not say.

    temperature, top_p, top_k, min_p, repetition_penalty: those of the target's generation config, else
        OpenAI's (1, 1, off, off, off).
    max_length: tokens that a prompt and its answer may have together.
    """

    name: str
    target: Target
    max_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, target: Target, name: str | None = None, max_length: int | None = None) -> ServedModel:
        """The target with the defaults of its generation config.

        Raises:
            EagleError: the target has less context than `max_length`.
        """
        if max_length is not None and max_length > target.max_length:
            raise EagleError(
                f"--max-model-len is {max_length} and {target.name} has {target.max_length} tokens of "
                "context; give no more than that"
            )
        config = target.model.generation_config
        return cls(
            name=name or target.name,
            target=target,
            max_length=max_length or target.max_length,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=config.top_p or 1.0,
            top_k=config.top_k or 0,
            min_p=getattr(config, "min_p", None) or 0.0,
            repetition_penalty=config.repetition_penalty or 1.0,
        )

    def unsupported_defaults(self) -> list[str]:
        """Settings of the target's generation config that change its answers elsewhere and not here."""
        config = self.target.model.generation_config
        neutral = {"no_repeat_ngram_size": 0, "typical_p": 1.0}
        values = {name: getattr(config, name, None) for name in neutral}
        return [f"{name}={value}" for name, value in values.items() if value not in (None, neutral[name])]

    @cached_property
    def tool_form(self) -> ToolForm:
        """How the target writes calls of tools."""
        return tool_form(self.target.tokenizer)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The target's tokens one by one."""
        return TokenTexts(self.target.tokenizer)

    @cached_property
    def token_names(self) -> TokenTexts:
        """The same, each named by its id."""
        return TokenTexts(self.target.tokenizer, as_ids=True)

    def special_tokens(self, words: Sequence[str]) -> dict[int, str]:
        """Those of the words that are special tokens, by id."""
        tokenizer = self.target.tokenizer
        special = set(tokenizer.all_special_tokens)
        return {tokenizer.convert_tokens_to_ids(word): word for word in words if word in special}

    def card(self) -> Model:
        """The model as the API lists it."""
        return Model(id=self.name, created=self.created, max_model_len=self.max_length)

    def require_name(self, name: str | None) -> None:
        """Raises ApiError (404) for another model's name; None stands for the one that is served."""
        if name is not None and name != self.name:
            message = f"the model {shown(name)} does not exist; this server has {shown(self.name)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """What a request may tell the chat template besides messages and tools."""
        return template_variables(self.target)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of plain text, with what the tokenizer puts at a text's start unless not `special`."""
        return self.target.tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]

    def require_ids(self, ids: list[int], param: str) -> None:
        """Raises ApiError (400) where the field `param` has ids that the target lacks."""
        size = self.target.vocab_size
        if max(ids, default=0) >= size:
            message = f"{param} has the token id {shown(max(ids))}; this model's end at {size - 1}"
            raise ApiError(400, message, param=param, code="invalid_value")

    def token_rules(self, request: AnswerRequest) -> TokenRules | None:
        """What the request rules out without a grammar, if anything.

        Raises:
            ApiError: it allows an id that the target lacks.
        """
        if not (request.min_tokens or request.allowed_token_ids or request.bad_words):
            return None
        self.require_ids(request.allowed_token_ids or [], "allowed_token_ids")
        ends = frozenset(request.stop_token_ids or ())
        return TokenRules(
            self.target.vocab_size,
            ends if request.ignore_eos else ends | self.target.eos_ids,
            allowed=request.allowed_token_ids,
            words=self._spelled(request.bad_words or ()),
            min_tokens=request.min_tokens or 0,
        )

    def _spelled(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of words, at the start of a text and after a space."""
        texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
        return [ids for text in texts if (ids := self.encode(text, special=False))]

    def seed(self, request: AnswerRequest) -> int:
        """The request's own, or a random one."""
        return secrets.randbits(SEED_BITS) if request.seed is None else request.seed

    def sampling(
        self,
        request: AnswerRequest,
        prompt_tokens: int,
        *,
        param: str = "messages",
        seed: int = 0,
        sample: int = 0,
        token_mask: TokenMask | None = None,
    ) -> SamplingParams:
        """How to answer a request.

        Args:
            param: where the prompt comes from, for errors.
            seed, sample: of this answer.

        Raises:
            ApiError: prompt and answer do not fit into the context, or a bias is for an id that the target
                lacks.
        """
        room = self.max_length - prompt_tokens
        limit = room if request.token_limit is None else request.token_limit
        if room < 1 or limit > room:
            wanted = f" and {limit} for the answer" if limit > room >= 1 else ""
            message = (
                f"the context is {self.max_length} tokens, and this request takes {prompt_tokens} for the "
                f"{param}{wanted}; make it shorter"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if request.min_tokens and request.min_tokens > limit:
            message = f"min_tokens is {request.min_tokens} and the answer has {limit} at most; lower it"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        if bias and max(bias) >= self.target.vocab_size:
            message = f"logit_bias names token {max(bias)}; this model's end at {self.target.vocab_size - 1}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        return SamplingParams(
            max_new_tokens=limit,
            temperature=_first(request.temperature, self.temperature),
            top_p=_first(request.top_p, self.top_p),
            top_k=self.top_k if request.top_k is None else min(max(request.top_k, 0), self.target.vocab_size),
            min_p=_first(request.min_p, self.min_p),
            repetition_penalty=_first(request.repetition_penalty, self.repetition_penalty),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=bias,
            token_mask=token_mask,
            seed=seed,
            sample=sample,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=request.told_tokens,
        )


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked
