"""vLLM serves heads that were trained here as they are: the text is that without them, acceptance is ours."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.artifacts.conversations import Conversation
from stages.decoding import EagleModel, SamplingParams
from stages.heads import Eagle3Config, HeadKind
from stages.targets import Target, resolve_target
from tests.vllm.conftest import CONTEXT, NEW_TOKENS, TARGET, Questions, Teacher
from tests.vllm.installed import needs_vllm
from tests.vllm.vllm_server import vllm_serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHAIN = 3


def accepted_here(target: Target, head: str, rows: list[Conversation]) -> tuple[int, list[int]]:
    """Verify steps, and those that accepted a draft at level 1, 2, ...; as vLLM counts.

    A step that begins within the answer counts in full, even if it drafts beyond the answer's end.
    """
    model = EagleModel.from_pretrained(target, head, tree=f"chain:depth={CHAIN}")
    params = SamplingParams(max_new_tokens=NEW_TOKENS + CHAIN + 1)
    steps, levels = 0, [0] * CHAIN
    for row in rows:
        starts = [
            i for i, (a, b) in enumerate(zip([0, *row.loss_mask], row.loss_mask, strict=False)) if b > a
        ]
        for start in starts:
            output = 0
            for number, tokens in enumerate(model.stream(row.input_ids[:start], params)):
                if output >= NEW_TOKENS:
                    break
                output += len(tokens)
                if number:
                    steps += 1
                    for level in range(len(tokens) - 1):
                        levels[level] += 1
    return steps, levels


def counted_by_vllm(url: str) -> tuple[int, list[int]]:
    """The same from its counters."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = {
        (name, position): float(value)
        for name, labels, value in re.findall(r"^vllm:(spec_decode_\w+)_total\{(.*)\} (\S+)$", text, re.M)
        for position in [re.search(r'position="(\d+)"', labels)]
        for position in [position and int(position[1])]
    }
    levels = [found["spec_decode_num_accepted_tokens_per_pos", level] for level in range(CHAIN)]
    return int(found["spec_decode_num_drafts", None]), [int(level) for level in levels]


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "method", "least"),
    [("eagle3", "eagle3", 0.5), ("eagle1", "eagle", 0.3), ("medusa", "medusa", 0.3)],
)
def test_vllm_serves_a_head_with_the_same_text_and_the_same_acceptance(
    questions: Questions,
    expected: list[Conversation],
    teacher: Teacher,
    target: Target,
    tmp_path: Path,
    kind: HeadKind,
    method: str,
    least: float,
) -> None:
    """In float32, where both are exact; asked by `--engine openai`, which it gives token ids."""
    head = teacher.head(kind)
    speculation = {"method": method, "model": head, "num_speculative_tokens": CHAIN}
    options = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager")
    with vllm_serve(
        resolve_target(TARGET).path,
        tmp_path / "log",
        *options,
        "--speculative-config",
        json.dumps(speculation),
    ) as url:
        assert questions.answered(tmp_path / "openai", engine="openai", base_url=url) == expected
        steps, levels = counted_by_vllm(url)
    our_steps, our_levels = accepted_here(target, head, expected)
    assert our_steps > 50
    assert sum(our_levels) / our_steps > least  # so that a head that is loaded wrongly shows
    assert sum(levels) / steps == pytest.approx(sum(our_levels) / our_steps, rel=0.05)
    for level, ours in zip(levels, our_levels, strict=True):
        assert level / steps == pytest.approx(ours / our_steps, abs=0.05)


@needs_vllm
@pytest.mark.parametrize("layers", [None, (2, 15, 27), (3, 14, 26)])
def test_vllm_takes_features_where_training_took_them(layers: tuple[int, int, int] | None) -> None:
    from transformers import LlamaConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    target = LlamaConfig(num_hidden_layers=30)
    config = Eagle3Config.from_target(target, 64, layers)
    draft = SimpleNamespace(hf_config=LlamaConfig(**config.to_hf()))
    runner = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    read = GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    assert read == (layers if layers == (3, 14, 26) else None)  # None: its default, tested above
