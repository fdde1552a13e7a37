"""Rolling a conversation out: the target answers the first turn, sees its answer, answers the next."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.artifacts.conversations import Conversation
from stages.decoding import GenerationResult, SamplingParams
from stages.gen_data.engines.engine import AnswerEngine, Question, Unusable
from stages.gen_data.engines.seed import SEED_BITS
from stages.prompts import Prompt
from stages.prompts.text import is_blank
from stages.targets import Target, TemplateRefusalError

Messages = list[dict[str, str]]


REPEATED = 32
"""An answer that ends in this many tokens of one kind is a loop, and no answer."""

TOKEN_CHARACTERS = 256
"""More characters than any tokenizer puts into a token on average; runs of blanks come to 128."""


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers: the sampling of every turn, and how many conversations run at once.

    Attributes:
        temperatures: each conversation is at one of them, by its prompt's id.
        samples: conversations made from each prompt, each with noise of its own.
        drop_truncated: leave out answers that were cut at `max_new_tokens`.
        max_model_len: most tokens of a conversation, None for the target's context.
    """

    max_new_tokens: int
    temperatures: tuple[float, ...]
    top_p: float
    seed: int
    batch_size: int
    top_k: int = 0
    samples: int = 1
    drop_truncated: bool = False
    max_model_len: int | None = None

    def of(self, prompt: Prompt, sample: int = 0, turn: int = 0) -> SamplingParams:
        """Sampling with the prompt's own seed, so that its answers depend on nothing else in the run.

        Each turn has another seed: not every engine tells places in a conversation apart by itself.
        """
        name = f"{self.seed}\0{prompt.id}" + (f"\0{turn}" if turn else "")
        key = hashlib.sha256(name.encode()).digest()
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self._temperature(prompt, sample),
            top_p=self.top_p,
            top_k=self.top_k,
            seed=int.from_bytes(key[:8], "little") % (1 << SEED_BITS),
            sample=sample,
        )

    def _temperature(self, prompt: Prompt, sample: int) -> float:
        """The next sample has the next temperature."""
        key = hashlib.sha256(f"{self.seed}\0{prompt.id}\0temperature".encode()).digest()
        return self.temperatures[(int.from_bytes(key[:8], "little") + sample) % len(self.temperatures)]

    def context(self, target: Target) -> int:
        """Most tokens of a conversation."""
        return min(target.max_length, self.max_model_len or target.max_length)

    def room(self, target: Target) -> int:
        """Tokens of the context that an answer of full length leaves to what comes before it."""
        return self.context(target) - self.max_new_tokens


@dataclass
class Dialogue:
    """A prompt being answered turn by turn, and the token ids so far.

    Attributes:
        sample: which of several conversations from the same prompt.
        messages: the chat so far, as the template gets it.
        input_ids: what the target saw and sampled, T ids.
        loss_mask: T numbers, 1 where sampled.
        rows: parts that are complete; more than one only if the template rewrites history.
        ended: why it ended before its last turn: `cut`, `truncated`, `degenerate`, `no_room`,
            `refused_by_template`, or what the engine calls an answer of no use; "" if it did not.
        refusal: why the template refused it.
    """

    prompt: Prompt
    sample: int = 0
    messages: Messages = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rows: list[Conversation] = field(default_factory=list)
    ended: str = ""
    refusal: str = ""
    _asked: int = 0
    _rendered: list[int] = field(default_factory=list)
    _finish_reason: str = ""
    _before: tuple[int, int] = (0, 0)  # messages and ids before the last question

    def __post_init__(self) -> None:
        if self.prompt.system:
            self.messages.append({"role": "system", "content": self.prompt.system})

    @property
    def is_over(self) -> bool:
        """Whether no turn of the user is left, or what came cannot be followed up."""
        return self._asked == len(self.prompt.turns) or bool(self.ended)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What the model may call."""
        return json.loads(self.prompt.tools) if self.prompt.tools else None

    def question(self, name: str, settings: AnswerSettings) -> Question:
        """The turn that was asked last, for an engine."""
        params = settings.of(self.prompt, self.sample, self._asked - 1)
        return Question(name, self.input_ids, params, list(self.messages), self.tools)

    def ask(self, target: Target, room: int, *, rendered_only: bool = False) -> bool:
        """Puts the user's next turn at the end of `input_ids`.

        Args:
            rendered_only: the target will see what the template makes of the messages, and not these ids; so
                they start anew where the two differ.

        Returns:
            False, with nothing asked, if the dialogue is over or this ends it: the tokens would be more than
            `room`, or the template refuses the turn.
        """
        if self.is_over:
            return False
        question = {"role": "user", "content": self.prompt.turns[self._asked]}
        if len(question["content"]) > room * TOKEN_CHARACTERS:  # tokenizing it might take all memory
            self.ended = "no_room"
            return False
        try:
            rendered = target.render([*self.messages, question], tools=self.tools)
        except TemplateRefusalError as error:
            self.ended, self.refusal = "refused_by_template", str(error)
            return False
        glue = self._continuation(target, rendered) if self._asked else None
        if rendered_only and glue is not None and self.input_ids + glue != rendered:
            glue = None
        shown = rendered if glue is None else self.input_ids + glue
        if len(shown) > room:
            self.ended = "no_room"
            return False
        if glue is None:
            self._close_row()
        self._before = (len(self.messages), len(self.input_ids))
        self.messages.append(question)
        self.loss_mask += [0] * (len(shown) - len(self.input_ids))
        self.input_ids = shown
        self._rendered = rendered
        self._asked += 1
        return True

    def hear(self, target: Target, answer: GenerationResult, drop_truncated: bool = False) -> None:
        """Adds the target's answer to the last question, or takes the question back if it is none."""
        cut = answer.finish_reason == "length"
        text = target.decode(answer.token_ids if cut else answer.token_ids[:-1])
        if is_degenerate(answer.token_ids, text):
            self.give_up("degenerate")
        elif cut and drop_truncated:
            self.give_up("truncated")
        else:
            self.messages.append({"role": "assistant", "content": text})
            self.input_ids = self.input_ids + answer.token_ids
            self.loss_mask = self.loss_mask + [1] * len(answer.token_ids)
            self._finish_reason = answer.finish_reason
            self.ended = "cut" if cut else ""

    def conversations(self) -> list[Conversation]:
        """The rows of the dialogue, at least one answer each; empty if nothing was answered."""
        self._close_row()
        return self.rows

    def withdraw(self, reason: str) -> None:
        """Makes no row of the dialogue: an answer is not to be kept."""
        self.rows, self.input_ids, self.loss_mask, self.ended = [], [], [], reason

    def give_up(self, reason: str) -> None:
        """Takes the last question back: its answer is of no use."""
        messages, ids = self._before
        del self.messages[messages:]
        self.input_ids, self.loss_mask = self.input_ids[:ids], self.loss_mask[:ids]
        self.ended = reason

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
            own_id = self.prompt.id if self.sample == 0 else f"{self.prompt.id}@{self.sample + 1}"
            row = Conversation(
                id=own_id if number == 0 else f"{own_id}#{number + 1}",
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


def is_degenerate(token_ids: Sequence[int], text: str) -> bool:
    """Whether an answer shows nothing, or ends in `REPEATED` tokens of one kind."""
    tail = token_ids[-REPEATED:]
    return is_blank(text) or (len(tail) == REPEATED and len(set(tail)) == 1)


@dataclass(frozen=True)
class Answers:
    """What became of some prompts.

    Attributes:
        rows: in the order of the prompts.
        left_out: source -> reason -> prompts of which no row came.
        ended: reason -> dialogues that ended before their last turn, also those with rows.
    """

    rows: list[Conversation]
    left_out: dict[str, dict[str, int]]
    ended: dict[str, int]

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue]) -> Answers:
        rows = [row for dialogue in dialogues for row in dialogue.conversations()]
        answered = {dialogue.prompt.id for dialogue in dialogues if dialogue.rows}
        left_out: dict[str, Counter[str]] = {}
        for dialogue in dialogues:
            if dialogue.prompt.id not in answered and dialogue.sample == 0:
                left_out.setdefault(dialogue.prompt.source, Counter())[dialogue.ended] += 1
        ended = Counter(dialogue.ended for dialogue in dialogues if dialogue.ended)
        return cls(rows, {source: dict(count) for source, count in left_out.items()}, dict(ended))


def roll_out(
    target: Target,
    prompts: Sequence[Prompt],
    settings: AnswerSettings,
    engine: AnswerEngine,
    on_answer: Callable[[GenerationResult, bool], None] = lambda answer, over: None,
    check: Callable[[Sequence[Dialogue]], None] = lambda dialogues: None,
) -> Answers:
    """All turns of all prompts, answered: first the first turns of all, then the second, and so on.

    Args:
        target: of its layers nothing is used.
        engine: runs the target.
        on_answer: called with every answer of use, and whether its dialogue is over.
        check: called with all dialogues at their end; it withdraws those that must not be kept.
    """
    dialogues = [Dialogue(prompt, sample) for prompt in prompts for sample in range(settings.samples)]
    room, rendered_only = settings.room(target), engine.reads_messages
    while asking := {
        str(i): dialogue
        for i, dialogue in enumerate(dialogues)
        if dialogue.ask(target, room, rendered_only=rendered_only)
    }:
        for answer in engine.answers([d.question(i, settings) for i, d in asking.items()]):
            dialogue = asking[answer.id]
            if isinstance(answer, Unusable):
                dialogue.give_up(answer.reason)
                continue
            dialogue.hear(target, answer, settings.drop_truncated)
            on_answer(answer, dialogue.is_over)
    check(dialogues)
    return Answers.of(dialogues)
