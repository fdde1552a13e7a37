"""Every engine gives the target's own greedy answers and writes them as the same artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.artifacts import open_artifact
from stages.artifacts.conversations import Conversation, read_conversations
from stages.decoding import EagleModel
from stages.gen_data import stage
from stages.gen_data.config import GenDataConfig
from stages.progress import Reporter
from stages.targets import Target, load_target, resolve_target
from tests.serve.running_server import NAME, running_server
from tests.tiny import write_jsonl
from tests.vllm.installed import needs_vllm
from tests.vllm.vllm_server import vllm_serve

pytestmark = pytest.mark.slow

TARGET = "builtin:smollm2"
CONTEXT = 512


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single questions, and two that are followed up."""
    single = [
        {"prompt": "Why is the sky blue?"},
        {"prompt": "Name three colours."},
        {"prompt": "What is 12 times 12?"},
        {"prompt": "Write a haiku about rain \u2614 in spring."},
    ]
    double = [
        {"turns": ["Who wrote Hamlet?", "In which century?"]},
        {"turns": ["Say hello in French.", "And in Spanish?"]},
    ]
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", [*single, *double])


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, device="cpu", dtype="float32")


def answer(prompts: Path, output: Path, **settings: object) -> list[Conversation]:
    fields = {
        "target": TARGET,
        "prompts": [str(prompts)],
        "output": str(output),
        "device": "cpu",
        "dtype": "float32",
        "max_new_tokens": 40,
        "max_model_len": CONTEXT,
        "batch_size": 6,
    }
    stage.run(GenDataConfig(**(fields | settings)), Reporter(quiet=True))  # type: ignore[arg-type]
    return list(read_conversations(open_artifact(str(output), "conversations")))


@pytest.fixture(scope="module")
def expected(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    return answer(prompts, tmp_path_factory.mktemp("transformers"))


@needs_vllm
def test_vllm_in_this_process(
    prompts: Path, expected: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert answer(prompts, tmp_path / "vllm", engine="vllm") == expected


@needs_vllm
def test_vllm_as_a_server(prompts: Path, expected: list[Conversation], tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager")
    with vllm_serve(resolve_target(TARGET).path, tmp_path / "log", *options) as url:
        assert answer(prompts, tmp_path / "openai", engine="openai", base_url=url) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_eagle_as_a_server(
    prompts: Path, target: Target, expected: list[Conversation], tmp_path: Path, temperature: float
) -> None:
    """It gives text and no ids; with its noise, the seeds make even sampled answers the same."""
    if temperature:
        expected = answer(prompts, tmp_path / "transformers", temperature=temperature)
    with running_server(EagleModel(target)) as server:
        settings = {"base_url": server.url, "served_model": NAME, "temperature": temperature}
        found = answer(prompts, tmp_path / "openai", engine="openai", **settings)
    whole = {row.id: row for row in expected}
    assert len(found) >= len(expected) - 1  # text that could be other tokens is not taken
    assert all(row == whole[row.id] for row in found)
