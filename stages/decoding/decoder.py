"""The decode loop: draft, verify, keep what the target agrees with, extend; plain decoding is the same loop.

tree   = drafter.propose()            the head guesses what follows the root
states = target(tree)                 one forward over all nodes
accept = accept_tree(logits)          the target's own token at every node, then one walk
keep, drafter.extend                  accepted rows become the prefix, their true features feed the head
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels import Acceptance, accept_tree
from stages.decoding.drafter import Drafter
from stages.decoding.sampling import SamplingParams, SamplingTensors, filter_logits
from stages.decoding.tree import DraftTree, tree_tensors
from stages.errors import EagleError
from stages.targets import SlotForward, SlotStep, Target

PREFILL_CHUNK = 512
FinishReason = Literal["stop", "length"]


@dataclass
class DecodeStats:
    """Counts and seconds of one request.

    steps: verify forwards, one a cycle; the prefill and the token it chooses are not counted.
    tokens: tokens those steps put out.
    drafted, accepted: drafted nodes verified, and those of them that entered the output.
    accepted_per_depth: how often level d + 1 of a tree was accepted.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accepted_per_depth: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens a verify step puts out, the target's own included (tau of the papers); 1 for plain
        decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0


class Decoder:
    """Decodes one sequence at a time in slot 0, plainly or with a drafter; the output is the same."""

    def __init__(self, target: Target, forward: SlotForward) -> None:
        self.target = target
        self.forward = forward

    def run(
        self, prompt_ids: list[int], params: SamplingParams, drafter: Drafter | None, stats: DecodeStats
    ) -> Iterator[list[int]]:
        """Yield the new tokens of each cycle, the first one from the prefill; ``stats`` is filled on the way.

        Raises:
            EagleError: the prompt is empty or leaves no room for a token in the target's context.
        """
        prompt = len(prompt_ids)
        room = self.target.max_length - prompt
        if not prompt or room < 1:
            raise EagleError(
                f"the prompt has {prompt} tokens; the target takes 1 to {self.target.max_length - 1}"
            )
        cap = min(params.max_new_tokens, room)
        end_ids = params.end_ids(self.target.eos_ids)
        self.forward.cache.reserve(prompt)
        if drafter is not None:
            drafter.start()
        keys = SamplingTensors.of([params], self.target.device)

        start = time.perf_counter()
        token = self._prefill(prompt_ids, params, keys, drafter)
        stats.prefill_s = time.perf_counter() - start
        output = 1
        yield [token]

        start = time.perf_counter()
        while token not in end_ids and output < cap:
            root_position = prompt + output - 1
            if drafter is None:
                tree = DraftTree.root_only(token)
            else:
                tree = drafter.propose(params.temperature, cap - output - 1)
            drafted = time.perf_counter()
            accepted, features = self._verify(tree, root_position, params, keys, tap=drafter is not None)
            count = int(accepted.count[0])
            path = accepted.path[0, :count].tolist()
            tokens = [tree.tokens[node] for node in path[1:]] + [int(accepted.token[0])]
            tokens = _until_end(tokens, end_ids)[: cap - output]
            verified = time.perf_counter()
            _count(stats, tree, len(tokens), min(count - 1, len(tokens)))
            stats.draft_s += drafted - start
            stats.verify_s += verified - drafted
            output += len(tokens)
            token = tokens[-1]
            if drafter is not None and token not in end_ids and output < cap:
                self.forward.cache.keep(
                    _slot(self.target), _at(root_position, self.target), accepted.path, accepted.count
                )
                assert features is not None
                drafter.extend(features[:, path], torch.tensor([tokens], device=self.target.device))
            now = time.perf_counter()
            stats.draft_s += now - verified
            stats.decode_s += now - start
            yield tokens
            start = time.perf_counter()

    @torch.inference_mode()
    def _prefill(
        self, prompt_ids: list[int], params: SamplingParams, keys: SamplingTensors, drafter: Drafter | None
    ) -> int:
        """Run the prompt, choose the first token and hand the features to the drafter."""
        device = self.target.device
        ids = torch.tensor([prompt_ids], device=device)
        count = ids.shape[1]
        for begin in range(0, count, PREFILL_CHUNK):
            chunk = ids[:, begin : begin + PREFILL_CHUNK]
            end = begin + chunk.shape[1]
            step = SlotStep.causal(self.forward.cache, 0, [begin], chunk.shape[1])
            positions = torch.arange(begin, begin + chunk.shape[1], device=device)[None]
            states = self.forward(chunk, positions, step, tap=drafter is not None)
            if drafter is not None and states.features is not None and end < count:
                drafter.extend(states.features, ids[:, begin + 1 : end + 1])
        root = tree_tensors(DraftTree.root_only(prompt_ids[-1]), count - 1, device)
        token = int(self._accept(states.last[:, -1:], root, params, keys).token[0])
        if drafter is not None and states.features is not None:
            drafter.extend(states.features, torch.cat((chunk[:, 1:], ids.new_tensor([[token]])), dim=1))
        return token

    @torch.inference_mode()
    def _verify(
        self, tree: DraftTree, root_position: int, params: SamplingParams, keys: SamplingTensors, *, tap: bool
    ) -> tuple[Acceptance, Tensor | None]:
        """One target forward over the tree; what it accepts, and the features of every node."""
        self.forward.cache.reserve(root_position + len(tree.tokens))
        tensors = tokens, _, positions, ancestors = tree_tensors(tree, root_position, self.target.device)
        step = SlotStep.tree(self.forward.cache, 0, [root_position], ancestors)
        states = self.forward(tokens, positions, step, tap=tap)
        return self._accept(states.last, tensors, params, keys), states.features

    def _accept(
        self, last: Tensor, tree: tuple[Tensor, ...], params: SamplingParams, keys: SamplingTensors
    ) -> Acceptance:
        tokens, parents, positions, _ = tree
        logits = filter_logits(self.target.logits(last), [params])
        return accept_tree(logits, tokens, parents, positions, keys.temperature, keys.seed, keys.sample)


def _slot(target: Target) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=target.device)


def _at(position: int, target: Target) -> Tensor:
    return torch.tensor([position], device=target.device)


def _until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the output, that one included."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: i + 1]
    return tokens


def _count(stats: DecodeStats, tree: DraftTree, tokens: int, accepted: int) -> None:
    stats.steps += 1
    stats.tokens += tokens
    stats.drafted += tree.drafted
    stats.accepted += accepted
    levels = stats.accepted_per_depth
    levels.extend([0] * (max(tree.depths) - len(levels)))
    for depth in range(accepted):
        levels[depth] += 1
