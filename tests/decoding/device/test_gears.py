"""The shape that puts out most tokens a second is found, in a simulated world."""

from __future__ import annotations

import random
from collections import Counter

from stages.decoding.device.gears import Gears

SECONDS = {1: [1.0, 1.2, 1.5, 2.0], 8: [1.0, 1.6, 2.4, 4.0]}
"""Of a cycle in each shape, by batch size; the first is plain decoding."""


def used(gears: Gears, size: int, tokens: list[float], cycles: int, seed: int = 0) -> Counter[int]:
    """How often each shape is chosen; what a cycle has found is told one cycle later."""
    source, chosen, flying = random.Random(seed), Counter(), None
    for _ in range(cycles):
        shape = gears.choose(size)
        chosen[shape] += 1
        if flying is not None:
            gears.observe(size, *flying)
        noise = source.uniform(0.8, 1.2)
        flying = shape, tokens[shape] * noise, SECONDS[size][shape]
    return chosen


def test_each_batch_size_goes_to_its_own_fastest_shape_and_stays_there():
    gears = Gears(4)
    good_head = [1.0, 1.9, 2.7, 3.3]
    assert used(gears, 1, good_head, 2000)[2] > 0.93 * 2000
    assert used(gears, 8, good_head, 2000)[1] > 0.93 * 2000
    assert used(gears, 1, good_head, 100)[2] == 100


def test_when_drafts_begin_to_fail_plain_decoding_is_taken_up_and_left_again():
    gears = Gears(4)
    used(gears, 1, [1.0, 1.9, 2.7, 3.3], 1000)
    assert used(gears, 1, [1.0, 1.05, 1.1, 1.1], 1000)[0] > 600
    assert used(gears, 1, [1.0, 1.9, 2.7, 3.3], 4000)[2] > 1500


def test_a_single_shape_is_always_chosen():
    assert used(Gears(1), 1, [1.0], 10) == {0: 10}
