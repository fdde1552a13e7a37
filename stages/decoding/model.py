"""The Python entrance to decoding: a target, maybe a head, and text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from stages.artifacts import Verify, open_artifact
from stages.decoding.drafters import DrafterChoice, drafter_of, make_drafter
from stages.decoding.engine import Engine, FinishReason, GenerationRequest
from stages.decoding.planner import CostPlanner, FixedPlanner
from stages.decoding.sampling import SamplingParams
from stages.decoding.stats import DecodeStats
from stages.decoding.tree import TreeConfig
from stages.errors import EagleError
from stages.heads import DraftHead, load_head
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template

DEFAULT_TREE = "cost"

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """One finished output; ``token_ids`` include the id that ended it, ``text`` leaves special tokens out."""

    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    stats: DecodeStats


class EagleModel:
    """A target with an optional draft head: text or token ids in, the target's own continuation out.

        model = EagleModel.from_pretrained("builtin:smollm2", "runs/demo/head")
        print(model.generate("What is a prime number?", max_new_tokens=64).text)

    The output for a prompt, parameters and seed is the same with the head and without one.
    Not safe to use from several threads at once.

    Attributes:
        engine: the loop beneath, for those who want sequences to join and leave.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        tree: TreeConfig | None = None,
        drafter: DrafterChoice | None = None,
        *,
        max_batch: int = 1,
        prefix_reuse: bool = False,
        overlap: bool | None = None,
    ) -> None:
        """See ``from_pretrained``."""
        self.target = target
        self.head = head
        self.tree = tree or TreeConfig.parse(DEFAULT_TREE)
        choice = drafter or drafter_of(head)
        layers = None
        if head is not None and head.kind == "eagle3":
            layers = head.config.feature_layers or target.feature_layers
        made = None
        if choice.kind != "none" and self.tree.kind != "none":
            made = make_drafter(choice, target, head, slots=max_batch)
        self.engine = Engine(
            target,
            slots=max_batch,
            layers=layers,
            drafter=made,
            planner=FixedPlanner(self.tree),
            prefix_reuse=prefix_reuse,
            overlap=overlap,
        )
        if made is not None and self.tree.kind == "cost":  # what was given above stood in for it
            self.engine.planner = CostPlanner(self.engine.measure_costs(), self.tree)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Target,
        head: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tree: str | TreeConfig = DEFAULT_TREE,
        chat_template: str | None = None,
        verify: Verify = "full",
        max_batch: int = 1,
        prefix_reuse: bool = False,
        overlap: bool | None = None,
    ) -> EagleModel:
        """Load a target and the head trained for it.

        Args:
            target: hub id, folder, ``.gguf`` file, ``builtin:smollm2``, or one that is loaded already.
            head: URI of a head artifact; None decodes plainly.
            tree: see ``TreeConfig.parse``.
            chat_template: a file with a template in place of the target's own.
            max_batch: sequences that are decoded together at most.
            prefix_reuse: whether a prompt that begins as an earlier sequence did reads only the rest.
            overlap: see ``Engine``; on a GPU True, unless said otherwise.
            verify: which files of the head are compared with their digests, as in ``open_artifact``.

        Raises:
            EagleError: one of them cannot be loaded, or the head was trained for another target.
        """
        config = TreeConfig.parse(tree) if isinstance(tree, str) else tree
        artifact = (
            open_artifact(head, "head", verify) if head is not None else None
        )  # refused before the target is loaded
        loaded = load_target(target, device, dtype) if isinstance(target, str) else target
        with_chat_template(loaded, chat_template)
        if artifact is None:
            return cls(loaded, None, config, max_batch=max_batch, prefix_reuse=prefix_reuse, overlap=overlap)
        artifact.require_target(loaded.fingerprint, "the target", ignore=("dtype",))
        loaded_head = load_head(artifact, dtype=loaded.dtype, device=loaded.device)
        return cls(
            loaded, loaded_head, config, max_batch=max_batch, prefix_reuse=prefix_reuse, overlap=overlap
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Prompt ids: of plain text as one user turn, of chat messages by the target's template, or ids as
        they are.

        Raises:
            EagleError: the prompt is empty, or the target has no chat template.
        """
        if isinstance(prompt, str):
            return self.target.render([{"role": "user", "content": prompt}])
        if not prompt:
            raise EagleError("the prompt is empty")
        if isinstance(prompt[0], int):
            return list(prompt)  # type: ignore[arg-type]
        return self.target.render(prompt)  # type: ignore[arg-type]

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: bool = True,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[Any]],
        params: SamplingParams | None = None,
        *,
        speculative: bool = True,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[str] | Sequence[Sequence[Any]],
        params: SamplingParams | None = None,
        *,
        speculative: bool = True,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Decode a prompt to its end, or several together.

        Args:
            prompt: see ``encode``; a list of texts, chats or lists of ids is a batch, of which ``max_batch``
                run at a time.
            params: how to sample; or its fields as keywords: ``max_new_tokens=64, temperature=0.7``.
            speculative: False leaves the head out; the output is the same.
            stop: texts that end an output; they and what follows are cut off.

        Raises:
            EagleError: a prompt is empty or does not fit the target's context, or a field is out of range.
        """
        if params is None:
            params = SamplingParams(**sampling)
        elif sampling:
            raise TypeError(f"give params or {', '.join(sampling)}, not both")
        if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], (str, list, tuple)):
            return self._generate([prompt], params, speculative, stop)[0]  # type: ignore[list-item]
        return self._generate(prompt, params, speculative, stop)  # type: ignore[arg-type]

    def _generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, speculative: bool, stop: Sequence[str]
    ) -> list[Generation]:
        requests = [GenerationRequest(str(i), self.encode(p), params) for i, p in enumerate(prompts)]
        outputs: list[list[int]] = [[] for _ in requests]
        done: dict[int, Generation] = {}
        try:
            for request in requests:
                self.engine.submit(request, drafts=speculative)
            while len(done) < len(requests):
                for emission in self.engine.step():
                    number = int(emission.id)
                    if number in done:
                        continue
                    before = len(outputs[number])
                    outputs[number] += emission.tokens
                    reason = emission.finish_reason
                    text = self.target.decode(outputs[number]) if stop or reason else ""
                    if (cut := _first(text, stop)) is not None:
                        outputs[number] = self._until(outputs[number], before, stop)
                        text, reason = text[:cut], "stop"
                        self.engine.cancel(emission.id)
                    if reason is not None:
                        prompt_ids = requests[number].prompt_ids
                        done[number] = Generation(text, prompt_ids, outputs[number], reason, emission.stats)
        finally:  # of an error or an interrupt the next call must find nothing
            for request in requests:
                self.engine.cancel(request.id)
        return [done[i] for i in range(len(requests))]

    def _until(self, token_ids: list[int], before: int, stop: Sequence[str]) -> list[int]:
        """The fewest tokens, more than ``before``, whose text has one of the stops."""
        for end in range(before + 1, len(token_ids)):
            if _first(self.target.decode(token_ids[:end]), stop) is not None:
                return token_ids[:end]
        return token_ids

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: bool = True,
        stats: DecodeStats | None = None,
        **sampling: Any,
    ) -> Iterator[list[int]]:
        """Yield the new token ids of each cycle; ``stats``, if given, is filled on the way.

        The arguments are those of ``generate``.
        """
        params = params or SamplingParams(**sampling)
        return self._stream(self.encode(prompt), params, speculative, stats or DecodeStats())

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams, speculative: bool, stats: DecodeStats
    ) -> Iterator[list[int]]:
        self.engine.submit(GenerationRequest("", prompt_ids, params), drafts=speculative)
        try:
            while self.engine.busy:
                for emission in self.engine.step():
                    vars(stats).update(vars(emission.stats))
                    yield emission.tokens
        finally:  # the caller may have lost interest
            self.engine.cancel("")


def _first(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stops begins in a text."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)
