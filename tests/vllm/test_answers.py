"""Every engine gives the target's own greedy answers and writes them as the same artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.artifacts.conversations import Conversation
from stages.decoding import EagleModel
from stages.targets import Target
from tests.serve.running_server import NAME, running_server
from tests.vllm.conftest import Questions
from tests.vllm.installed import needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@needs_vllm
def test_vllm_in_this_process(
    questions: Questions, expected: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert questions.answered(tmp_path / "vllm", engine="vllm") == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_eagle_as_a_server(
    questions: Questions, target: Target, expected: list[Conversation], tmp_path: Path, temperature: float
) -> None:
    """It gives text and no ids; with its noise, the seeds make even sampled answers the same."""
    settings: dict[str, object] = {}
    if temperature:
        settings = {"temperature": temperature, "max_new_tokens": 24}
        expected = questions.answered(tmp_path / "transformers", **settings)
    with running_server(EagleModel(target)) as server:
        settings |= {"base_url": server.url, "served_model": NAME}
        found = questions.answered(tmp_path / "openai", engine="openai", **settings)
    whole = {row.id: row for row in expected}
    assert len(found) >= len(expected) - 1  # text that could be other tokens is not taken
    assert all(row == whole[row.id] for row in found)
