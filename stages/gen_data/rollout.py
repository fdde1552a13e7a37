"""Rolling a conversation out: the target answers the first turn, sees its answer, answers the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stages.artifacts.conversations import Conversation
from stages.decoding import GenerationRequest, GenerationResult, SamplingParams, generate_batch
from stages.prompts import Prompt
from stages.targets import Target

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers: the sampling of every turn, and how many conversations run at once."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int

    def of(self, prompt: Prompt) -> SamplingParams:
        """Sampling with the prompt's own seed, so that its answers depend on nothing else in the run."""
        key = hashlib.sha256(f"{self.seed}\0{prompt.id}".encode()).digest()
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=int.from_bytes(key[:8], "little"),
        )

    def room(self, target: Target) -> int:
        """Tokens of the target's context that an answer of full length leaves to what comes before it."""
        return target.max_length - self.max_new_tokens


@dataclass
class Dialogue:
    """A prompt being answered turn by turn, and the token ids so far.

    Attributes:
        messages: the chat so far, as the template gets it.
        input_ids: what the target saw and sampled, T ids.
        loss_mask: T numbers, 1 where sampled.
        rows: parts that are complete; more than one only if the template rewrites history.
    """

    prompt: Prompt
    messages: Messages = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rows: list[Conversation] = field(default_factory=list)
    _asked: int = 0
    _rendered: list[int] = field(default_factory=list)
    _finish_reason: str = ""

    def __post_init__(self) -> None:
        if self.prompt.system:
            self.messages.append({"role": "system", "content": self.prompt.system})

    @property
    def is_over(self) -> bool:
        """Whether no turn of the user is left, or the last answer was cut and so cannot be followed up."""
        return self._asked == len(self.prompt.turns) or self._finish_reason == "length"

    def ask(self, target: Target, room: int) -> bool:
        """Puts the user's next turn at the end of `input_ids`.

        Returns:
            False, with nothing changed, if the dialogue is over or the tokens would be more than `room`.
        """
        if self.is_over:
            return False
        question = {"role": "user", "content": self.prompt.turns[self._asked]}
        rendered = target.render([*self.messages, question])
        glue = self._continuation(target, rendered) if self._asked else None
        shown = rendered if glue is None else self.input_ids + glue
        if len(shown) > room:
            return False
        if glue is None:
            self._close_row()
        self.messages.append(question)
        self.loss_mask += [0] * (len(shown) - len(self.input_ids))
        self.input_ids = shown
        self._rendered = rendered
        self._asked += 1
        return True

    def hear(self, target: Target, answer: GenerationResult) -> None:
        """Adds the target's answer to the last question."""
        text = target.decode(answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.input_ids = self.input_ids + answer.token_ids
        self.loss_mask = self.loss_mask + [1] * len(answer.token_ids)
        self._finish_reason = answer.finish_reason

    def conversations(self) -> list[Conversation]:
        """The rows of the dialogue, at least one answer each; empty if nothing was answered."""
        self._close_row()
        return self.rows

    def _continuation(self, target: Target, rendered: list[int]) -> list[int] | None:
        """What the template puts behind the last answer's end-of-turn token to ask the next question.

        The answer's ids need not be the tokenizer's choice for its text, so `rendered` is compared in three
        parts: what was rendered for the last question as ids, the answer as text, the end of turn as id.

        Returns:
            None if the template shows the past otherwise than the target saw it.
        """
        start = len(self._rendered)
        if rendered[:start] != self._rendered or self.input_ids[-1] not in rendered[start:]:
            return None
        end = rendered.index(self.input_ids[-1], start)
        if target.decode(rendered[start:end]) != self.messages[-1]["content"]:
            return None
        return rendered[end + 1 :]

    def _close_row(self) -> None:
        if any(self.loss_mask):
            number = len(self.rows)
            row = Conversation(
                id=self.prompt.id if number == 0 else f"{self.prompt.id}#{number + 1}",
                source=self.prompt.source,
                license=self.prompt.license,
                category=self.prompt.category,
                messages=list(self.messages),
                input_ids=self.input_ids,
                loss_mask=self.loss_mask,
                finish_reason=self._finish_reason,
            )
            self.rows.append(row)
        self.input_ids, self.loss_mask = [], []


def roll_out(
    target: Target,
    prompts: Sequence[Prompt],
    settings: AnswerSettings,
    on_answer: Callable[[GenerationResult, bool], None] = lambda answer, over: None,
) -> list[Conversation]:
    """All turns of all prompts, answered: first the first turns of all, then the second, and so on.

    Args:
        on_answer: called with every answer, and whether its dialogue is over.

    Returns:
        Rows in the order of the prompts. A prompt that does not fit into the target's context gives none.
    """
    dialogues = [Dialogue(prompt) for prompt in prompts]
    room = settings.room(target)
    while asking := {str(i): dialogue for i, dialogue in enumerate(dialogues) if dialogue.ask(target, room)}:
        requests = [GenerationRequest(i, d.input_ids, settings.of(d.prompt)) for i, d in asking.items()]
        for answer in generate_batch(target, requests, max_batch=settings.batch_size):
            dialogue = asking[answer.id]
            dialogue.hear(target, answer)
            on_answer(answer, dialogue.is_over)
    return [row for dialogue in dialogues for row in dialogue.conversations()]
