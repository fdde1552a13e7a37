"""The drafter that is right as often as it is told to be."""

from __future__ import annotations

import random

import pytest

from stages.decoding import SamplingParams
from stages.decoding.drafters import OracleDrafter
from stages.errors import EagleError
from tests.decoding.test_drafters import PLAN


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_the_oracle_is_right_as_often_as_it_should_be(right: float) -> None:
    prompt, output = [3, 1, 4], [random.Random(i).randrange(100) for i in range(1500)]
    drafter = OracleDrafter(right, 100)
    drafter.know(prompt, output)
    drafter.start(0, prompt, SamplingParams())
    drafter.extend([0], None, [[*prompt[1:], output[0]]])
    done, trials, hits = 1, 0, 0
    while done < len(output) - 6:
        tree = drafter.propose([0], [PLAN])[0]
        truth = output[done:]
        node, count = 0, 0
        while True:
            children = [i for i, p in enumerate(tree.parents) if p == node]
            if not children:
                break
            trials += 1
            match = [i for i in children if tree.tokens[i] == truth[count]]
            if not match:
                break
            assert match[0] == children[0]
            hits, node, count = hits + 1, match[0], count + 1
        drafter.extend([0], None, [truth[: count + 1]])
        done += count + 1
    assert hits / trials == pytest.approx(right, abs=0.04)


def test_the_oracle_knows_no_other_prompt() -> None:
    with pytest.raises(EagleError, match="no output for this prompt"):
        OracleDrafter(0.5, 100).start(0, [1], SamplingParams())
