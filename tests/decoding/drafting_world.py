"""A simulated machine and head: real trees and planners, simulated time and acceptance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stages.decoding.costs import Costs
from stages.decoding.drafters.calibration import Calibration
from stages.decoding.growth import TreeGrowth, frontiers, trees
from stages.decoding.planner import Cycle, Planner

WIDTH = 4
CPU_VERIFY = {
    1: 0.0120,
    2: 0.0125,
    4: 0.0155,
    6: 0.0207,
    8: 0.0216,
    12: 0.0250,
    16: 0.0261,
    32: 0.0450,
    64: 0.0800,
}
CPU_DRAFT = {1: 0.0015, 4: 0.0020, 8: 0.0025, 32: 0.0060}
GPU_VERIFY = {1: 0.0100, 16: 0.0105, 64: 0.0130, 256: 0.0300}
GPU_DRAFT = {1: 0.0008, 64: 0.0010}


@dataclass(frozen=True)
class Profile:
    """How good a head is.

    acceptance: mean chance of the first child, level by level; the last holds for all below.
    spread: how much it varies from node to node, 0 to 1.
    stretch, shift: of the logit of what the head says against the truth.
    """

    acceptance: Sequence[float]
    spread: float = 0.5
    stretch: float = 1.0
    shift: float = 0.0

    def chances(self, depth: int, source: random.Random) -> list[float]:
        """True chances of a node's children, best first."""
        mean = self.acceptance[min(depth, len(self.acceptance)) - 1]
        if self.spread > 0:
            count = (1 - self.spread) * 8 + 0.5
            first = source.betavariate(mean * count, (1 - mean) * count)
        else:
            first = mean
        rest = (1 - first) * mean  # a bad head is bad at its other guesses too
        return sorted((first, rest * 0.5, rest * 0.25, rest * 0.12), reverse=True)

    def stated(self, chance: float) -> float:
        chance = min(max(chance, 1e-4), 1 - 1e-4)
        x = self.stretch * math.log(chance / (1 - chance)) + self.shift
        return 1 / (1 + math.exp(-x))


@dataclass
class World:
    """Sequences that decode side by side, each of ``tokens`` tokens, one following the other in its slot.

    prompt: tokens that the drafter reads before its first tree of a sequence.
    beside: sequences that never draft.
    mood: how much longer than ``costs`` all takes on the machine, by the time.
    """

    profile: Callable[[int], Profile]  # of the sequence with this number
    costs: Costs
    batch: int = 1
    tokens: int = 200
    seed: int = 0
    calibration: Calibration | None = None
    prompt: int = 0
    beside: int = 0
    mood: Callable[[float], float] = lambda seconds: 1.0
    seconds: float = 0.0
    put_out: int = 0
    used: list[int] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)  # by slot: tokens that the drafter has not read

    def run(self, planner: Planner, sequences: int) -> float:
        """Tokens a second."""
        source = random.Random(self.seed)
        profiles = {slot: self.profile(slot) for slot in range(self.batch)}
        left = dict.fromkeys(range(self.batch), self.tokens)
        self.waiting = dict.fromkeys(range(self.batch), self.prompt + 1)
        begun = self.batch
        while left:
            slots = sorted(left)
            for slot, accepted in zip(
                slots, self._cycle(planner, slots, profiles, left, source), strict=True
            ):
                left[slot] -= accepted + 1
                self.waiting[slot] += accepted + 1
                self.put_out += accepted + 1
                if left[slot] <= 0:
                    del left[slot]
                    if begun < sequences:
                        left[slot], profiles[slot] = self.tokens, self.profile(begun)
                        self.waiting[slot] = self.prompt + 1
                        planner.start(slot)
                        begun += 1
        return self.put_out / self.seconds

    def _cycle(
        self,
        planner: Planner,
        slots: list[int],
        profiles: dict[int, Profile],
        left: dict[int, int],
        source: random.Random,
    ) -> list[int]:
        plans = planner.plan(slots, [left[slot] - 1 for slot in slots], self.beside)
        growths = [TreeGrowth(plan, root=-1, confidence=self.calibration) for plan in plans]
        truth: list[dict[int, int | None]] = [{} for _ in slots]

        def branch(b: int, candidate: int) -> None:
            growth = growths[b]
            depth = growth.depth(candidate) + 1 if candidate >= 0 else 1
            profile = profiles[slots[b]]
            chances = profile.chances(depth, source)
            draw, right = source.random(), None
            for rank, chance in enumerate(chances):
                if draw < chance and right is None:
                    right = rank
                draw -= chance
            width = min(growth.plan.width, WIDTH)
            truth[b][candidate] = right
            scores = [math.log(profile.stated(chance)) for chance in chances[:width]]
            growth.add_children(candidate, list(range(width)), scores)

        drafting = [b for b, plan in enumerate(plans) if plan.kind != "none" and plan.depth > 0]
        passes = []
        if drafting:
            passes.append(sum(self.waiting[slots[b]] for b in drafting))
            for b in drafting:
                self.waiting[slots[b]] = 0
                branch(b, -1)
            while any(levels := frontiers(growths)):
                passes.append(sum(map(len, levels)))
                for b, level in enumerate(levels):
                    growths[b].expand(level)
                    for candidate in level:
                        branch(b, candidate)
        made = trees(growths)
        mood = self.mood(self.seconds)
        draft_s = mood * sum(self.costs.draft_s(rows) for rows in passes)
        verify_s = mood * self.costs.verify_s(sum(len(tree.tokens) for tree in made) + self.beside)
        accepted = []
        for b, tree in enumerate(made):
            output = self._output(truth[b], growths[b])
            node, count = 0, 0
            for token in output:
                match = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
                if not match:
                    break
                node, count = match[0], count + 1
            accepted.append(min(count, left[slots[b]] - 1))
            if self.calibration is not None and b in drafting:
                self.calibration.observe(growths[b].outcomes([*output, -2]))
            self.used.append(tree.drafted)
        planner.observe(Cycle(slots, made, accepted, draft_s, verify_s, passes, self.beside))
        self.seconds += draft_s + verify_s
        return accepted

    @staticmethod
    def _output(truth: dict[int, int | None], growth: TreeGrowth) -> list[int]:
        """The ranks along the true path, as far as candidates go."""
        output: list[int] = []
        node = -1
        while (rank := truth.get(node)) is not None:
            children = [i for i in range(growth.candidates) if growth.parent(i) == node]
            if rank >= len(children):
                break
            output.append(rank)
            node = children[rank]
        return output
