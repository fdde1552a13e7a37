"""The Python entrance to decoding: a target, maybe a head, and text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.artifacts import Verify, open_artifact
from stages.decoding.cost import CostPlanner, FixedPlanner
from stages.decoding.drafters import DrafterChoice, drafter_of, make_drafter
from stages.decoding.engine import Engine, FinishReason, GenerationRequest
from stages.decoding.sampling import SamplingParams
from stages.decoding.stats import DecodeStats
from stages.decoding.tree import TreeConfig
from stages.errors import EagleError
from stages.heads import DraftHead, load_head
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template

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
    """A target with an optional draft head, decoding one sequence at a time.

    The output for a prompt, parameters and seed is the target's own, with or without the head.
    Not safe to use from several threads at once.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        tree: TreeConfig | None = None,
        drafter: DrafterChoice | None = None,
        *,
        max_batch: int = 1,
    ) -> None:
        self.target = target
        self.head = head
        self.tree = tree or TreeConfig()
        choice = drafter or drafter_of(head)
        layers = None
        if head is not None and head.kind == "eagle3":
            layers = head.config.feature_layers or target.feature_layers
        made = None
        if choice.kind != "none" and self.tree.kind != "none":
            made = make_drafter(choice, target, head, slots=max_batch)
        self.engine = Engine(
            target, slots=max_batch, layers=layers, drafter=made, planner=FixedPlanner(self.tree)
        )
        if made is not None and self.tree.kind == "cost":
            self.engine.planner = CostPlanner(self.engine.measure_costs(), self.tree)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Target,
        head: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tree: str | TreeConfig = "cost",
        chat_template: str | None = None,
        verify: Verify = "full",
        max_batch: int = 1,
    ) -> EagleModel:
        """Load a target and the head trained for it.

        Args:
            target: hub id, folder, ``.gguf`` file, ``builtin:smollm2``, or one that is loaded already.
            head: URI of a head artifact; None decodes plainly.
            tree: see ``TreeConfig.parse``.
            chat_template: a file with a template in place of the target's own.
            max_batch: sequences that are decoded together at most.
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
            return cls(loaded, None, config, max_batch=max_batch)
        artifact.require_target(loaded.fingerprint, "the target", ignore=("dtype",))
        loaded_head = load_head(artifact, dtype=loaded.dtype, device=loaded.device)
        return cls(loaded, loaded_head, config, max_batch=max_batch)

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

    def generate(self, prompt: Prompt, params: SamplingParams, *, speculative: bool = True) -> Generation:
        """Decode one prompt to its end; ``speculative=False`` leaves the head out."""
        prompt_ids = self.encode(prompt)
        stats = DecodeStats()
        token_ids = [
            token for tokens in self._run(prompt_ids, params, speculative, stats) for token in tokens
        ]
        stopped = token_ids[-1] in params.end_ids(self.target.eos_ids)
        return Generation(
            self.target.decode(token_ids), prompt_ids, token_ids, "stop" if stopped else "length", stats
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        speculative: bool = True,
        stats: DecodeStats | None = None,
    ) -> Iterator[list[int]]:
        """Yield the new token ids of each cycle; ``stats``, if given, is filled on the way."""
        return self._run(self.encode(prompt), params, speculative, stats or DecodeStats())

    def _run(
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
