"""A fleet behind an OpenAI-compatible API.

How a server is spoken to is found out with one short request. Best is `/completions` with token ids in and
out, as vLLM has it: then nothing is left to chance. A server that gives no ids has its text tokenised again,
and one that takes only chats renders them itself; both are checked against the tokens that it counted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.decoding import GenerationResult, SamplingParams
from stages.errors import EagleError
from stages.gen_data.engines.endpoint import Endpoint, RefusedError
from stages.gen_data.engines.engine import Question, Unusable
from stages.gen_data.engines.retokenise import Retokeniser
from stages.gen_data.engines.seed import outside_seed
from stages.targets import Target, resolve_target

ENOUGH = 20
"""Answers after which the engine gives up if more than half of them cannot be used."""

# A server's own defaults must not change the answers: vLLM takes them from the target's generation config.
_NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True)
class Dialect:
    """What a server understands.

    Attributes:
        chat: messages instead of token ids.
        neutral: fields beyond OpenAI's own.
        token_ids: vLLM's `return_token_ids`.
    """

    chat: bool
    neutral: bool
    token_ids: bool

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, model: str, question: Question) -> dict[str, Any]:
        """The request for an answer."""
        params = question.params
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": outside_seed(params),
        }
        if self.chat:
            body["messages"] = question.messages
            if question.tools:
                body["tools"] = question.tools
        else:
            body["prompt"] = question.prompt_ids
        if self.neutral:
            body |= _NEUTRAL | {"top_k": params.top_k or -1}
        if self.token_ids:
            body["return_token_ids"] = True
        return body


DIALECTS = tuple(
    Dialect(chat, neutral, token_ids)
    for chat in (False, True)
    for neutral, token_ids in ((True, True), (True, False), (False, False))
)
"""The best first."""


class OpenAiEngine:
    """Many requests at once to one address."""

    def __init__(
        self, target: Target, base_url: str, batch_size: int, max_length: int, served_model: str | None = None
    ) -> None:
        """Looks at the server.

        Args:
            target: the model that should be served; its layers need not be loaded.
            base_url: with or without the `/v1`.
            batch_size: requests at a time.
            max_length: tokens of the longest conversation.
            served_model: the server's name for the target, if that is another.

        Raises:
            EagleError: the server cannot be reached, serves another model as far as can be seen, or has less
                context.
        """
        self._target = target
        self._threads = batch_size
        self._retokeniser = Retokeniser.of(target)
        self._endpoint = Endpoint(base_url, batch_size)
        self._used = self._unusable = 0
        self._model = self._find_model(served_model, max_length)
        self._dialect = self._find_dialect()

    @property
    def reads_messages(self) -> bool:
        return self._dialect.chat

    def answers(self, questions: Sequence[Question]) -> Iterator[GenerationResult | Unusable]:
        waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
        for question in questions:
            waiting.put(question)
        replies: queue.SimpleQueue[tuple[Question, Any]] = queue.SimpleQueue()
        stopped = threading.Event()

        def ask() -> None:
            while not stopped.is_set():
                try:
                    question = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    replies.put((question, self._ask(question)))
                except BaseException as error:
                    replies.put((question, error))

        # Daemons, so that a person who stops the stage does not wait for answers that nobody will read.
        for _ in range(min(self._threads, len(questions))):
            threading.Thread(target=ask, name="openai", daemon=True).start()
        try:
            for _ in questions:
                question, reply = replies.get()
                if isinstance(reply, BaseException):
                    raise reply
                answer = reply if isinstance(reply, Unusable) else self._verified(question, reply)
                self._count(answer)
                yield answer
        finally:
            stopped.set()

    def close(self) -> None:
        self._endpoint.close()

    def _find_model(self, served_model: str | None, max_length: int) -> str:
        """The server's name for the target, as far as it tells."""
        try:
            listed = self._endpoint.get("/models")
            cards = {card["id"]: card for card in listed["data"]}
        except RefusedError:  # not every server lists its models
            return served_model or self._target.name
        except (KeyError, TypeError) as error:
            raise self._foreign("its list of models", error) from error
        names = [name for name, card in cards.items() if self._is_target(name, card)]
        model = served_model or next(iter(names), None)
        if model is None or model not in cards:
            raise EagleError(
                f"the server at {self._endpoint.url} has {', '.join(cards) or 'no model'}, and not "
                f"{served_model or self._target.name}: give the name of the target there as --served-model"
            )
        room = cards[model].get("max_model_len")
        if isinstance(room, int) and room < max_length:
            raise EagleError(
                f"{model} at {self._endpoint.url} has a context of {room:,} tokens, and conversations may "
                f"have {max_length:,}: give --max-model-len {room}"
            )
        return model

    def _is_target(self, name: str, card: Mapping[str, Any]) -> bool:
        own = {self._target.name, str(resolve_target(self._target.name).path)}
        return bool(own & {name, card.get("root")}) or name == Path(self._target.name).name

    def _find_dialect(self) -> Dialect:
        """The best way to ask that the server takes and that shows it the target's own tokens."""
        chat = [{"role": "user", "content": "Hi"}]
        params = SamplingParams(max_new_tokens=1)
        question = Question("probe", self._target.render(chat), params, chat)
        refused = ""
        for dialect in DIALECTS:
            try:
                reply = self._endpoint.post(dialect.path, dialect.body(self._model, question))
            except RefusedError as error:
                refused = refused or str(error)
                continue
            seen = _Reply.of(reply, dialect.chat, self._foreign)
            if seen.prompt_tokens not in (None, len(question.prompt_ids)):
                raise EagleError(
                    f"{self._model} at {self._endpoint.url} sees {seen.prompt_tokens} tokens where the "
                    f"target sees {len(question.prompt_ids)}: it has another tokenizer or chat template than "
                    f"{self._target.name}"
                )
            return dialect
        raise EagleError(
            f"{self._model} at {self._endpoint.url} takes neither completions nor chats ({refused}): correct "
            "--base-url or --served-model"
        )

    def _ask(self, question: Question) -> _Reply | Unusable:
        if question.params.top_k and not self._dialect.neutral:
            raise EagleError(f"the server at {self._endpoint.url} knows no top_k: leave --top-k out")
        try:
            reply = self._endpoint.post(self._dialect.path, self._dialect.body(self._model, question))
        except RefusedError as error:
            return Unusable(question.id, "refused_by_server", str(error))
        return _Reply.of(reply, self._dialect.chat, self._foreign)

    def _verified(self, question: Question, seen: _Reply) -> GenerationResult | Unusable:
        """The answer as the ids that were sampled, if the reply leaves no doubt about them."""

        def unusable(detail: str) -> Unusable:
            return Unusable(question.id, "unverified", detail)

        prompt = len(question.prompt_ids)
        if seen.prompt_tokens not in (None, prompt) or seen.prompt_ids not in (None, question.prompt_ids):
            return unusable(f"the server saw {seen.prompt_tokens} tokens of prompt, not these {prompt}")
        if self._dialect.chat and seen.prompt_tokens is None and seen.prompt_ids is None:
            return unusable("the server does not count the tokens of the prompt")
        if seen.finish_reason not in ("stop", "length"):
            return unusable(f"it ended with {seen.finish_reason}")
        stopped = seen.finish_reason == "stop"
        ids = self._sampled_ids(seen, stopped)
        if ids is None:
            return unusable("the reply does not tell which tokens were sampled")
        if not ids:
            return unusable("the answer has no token")
        if len(ids) > question.params.max_new_tokens:
            return unusable(f"the answer has {len(ids)} tokens")
        return GenerationResult(question.id, ids, "stop" if stopped else "length")

    def _sampled_ids(self, seen: _Reply, stopped: bool) -> list[int] | None:
        if seen.token_ids is None:
            if seen.text is None or seen.completion_tokens is None:
                return None
            return self._retokeniser.ids(seen.text, seen.completion_tokens, stopped=stopped)
        ids = seen.token_ids
        if not stopped or (ids and ids[-1] in self._target.eos_ids):
            return ids
        end_id = self._retokeniser.end_id
        if end_id is None or seen.completion_tokens == len(ids):
            return None  # it ended with a token that does not end the target's answers
        return [*ids, end_id]

    def _count(self, answer: GenerationResult | Unusable) -> None:
        """Gives up when most answers are of no use: that is no accident."""
        self._used += 1
        if isinstance(answer, Unusable):
            self._unusable += 1
            if self._used >= ENOUGH and self._unusable > self._used // 2:
                raise EagleError(
                    f"{self._unusable} of {self._used} answers of {self._model} at {self._endpoint.url} "
                    f"cannot be used ({answer.detail}): see that it serves {self._target.name}, unchanged"
                )

    def _foreign(self, what: str, error: object) -> EagleError:
        return EagleError(
            f"the server at {self._endpoint.url} speaks no OpenAI API, {what} lacks {error}: correct "
            "--base-url"
        )


@dataclass(frozen=True)
class _Reply:
    """What matters of a reply; None where the server does not say."""

    text: str | None
    token_ids: list[int] | None
    prompt_ids: list[int] | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None

    @classmethod
    def of(cls, reply: Any, chat: bool, foreign: Any) -> _Reply:
        """Raises EagleError, made by `foreign`, for what is no reply of this API."""
        try:
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            text = choice["message"].get("content") if chat else choice["text"]
            return cls(
                text=text,
                token_ids=choice.get("token_ids"),
                prompt_ids=choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
                prompt_tokens=usage.get("prompt_tokens"),
                completion_tokens=usage.get("completion_tokens"),
                finish_reason=choice.get("finish_reason"),
            )
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise foreign("a reply", error) from error
