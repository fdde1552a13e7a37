"""vLLM gives the states that transformers gives, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.errors import EagleError
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.engine import TransformersStates
from stages.features.layout import FeatureShard, read_feature_shards
from stages.features.states import TokenBatch
from stages.features.storage import StorageFormat
from stages.features.vllm_states import VllmStates
from stages.progress import Reporter
from stages.targets import Target, load_target
from stages.targets.ends import load_target_ends
from stages.vllm.engine import Vllm
from tests.tiny import make_tiny_target
from tests.vllm.installed import needs_vllm

TARGET = "builtin:smollm2"
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
LENGTHS = [300, 20, 64, 7, 129, *range(30, 60, 3)]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text that the model has a clear opinion of, its second half called the answer."""
    uri = str(tmp_path_factory.mktemp("conversations"))
    target = load_target_ends(TARGET, "cpu", torch.float32)
    ids = target.tokenizer.encode(TEXT.read_text())
    rows = [
        Conversation(
            id=str(end),
            source="test",
            license="",
            category="",
            messages=[],
            input_ids=ids[end - length : end],
            loss_mask=[int(i >= length // 2) for i in range(length)],
            finish_reason="stop",
        )
        for length, end in zip(LENGTHS, accumulate(LENGTHS), strict=True)
    ]
    with ArtifactWriter.open(uri, "conversations", {}, target=target.fingerprint) as writer:
        writer.add_shard(shard_name(0), write_conversations(rows), rows=len(rows))
        writer.finish({"rows": len(rows)})
    return uri


def extract(conversations: str, output: Path, **settings: object) -> list[FeatureShard]:
    fields = {"target": TARGET, "conversations": conversations, "output": str(output), "device": "cpu"}
    config = ExtractFeaturesConfig(**(fields | {"forward_tokens": 512, "shard_bytes": 4 * 2**20} | settings))  # type: ignore[arg-type]
    stage.run(config, Reporter(quiet=True))
    return list(read_feature_shards(open_artifact(str(output), "features")))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of any vector, of states [n, h]."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_writes_the_artifact_that_transformers_writes(
    conversations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Path(tempfile.mkdtemp())  # short: sockets go there
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    expected = extract(conversations, tmp_path / "transformers", dtype="float32")
    found = extract(conversations, tmp_path / "vllm", dtype="float32", engine="vllm")

    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("input_ids", "loss_mask", "row_offsets", "row_ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for tap, layer in zip(ours.aux.chunk(3, dim=1), theirs.aux.chunk(3, dim=1), strict=True):
            assert relative_error(tap, layer) < 1e-4
        assert relative_error(ours.last, theirs.last) < 1e-4
        assert (ours.target_argmax == theirs.target_argmax).float().mean() > 0.99
    scratch.rmdir()  # refuses if anything is left in it


def test_a_gguf_file_is_refused_before_anything_is_loaded(tiny_target: Target, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    target = replace(tiny_target, name=str(path))
    with pytest.raises(EagleError, match="is a GGUF file: use --engine transformers"):
        Vllm(target, max_length=32, max_running=1)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layers_shared_by_two_processes_give_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core each
    name = str(make_tiny_target(tmp_path, arch="qwen3", hidden=128))
    target = load_target(name, device="cpu", dtype="float32", decodes=False)
    rows = [torch.arange(3, 3 + length, dtype=torch.int32) for length in (300, 5, 64)]
    batch = TokenBatch(
        row_ids=(0, 1, 2),
        input_ids=torch.cat(rows),
        loss_mask=torch.ones(sum(map(len, rows)), dtype=torch.uint8),
        row_offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
    )
    layers, storage = target.feature_layers, StorageFormat(torch.float32)
    with closing(TransformersStates(target, layers, storage)) as engine:
        ((_, expected),) = engine.states([batch])
    shared = VllmStates(target, layers, storage, max_length=300, forward_tokens=128, tensor_parallel_size=2)
    with closing(shared):
        ((_, found),) = shared.states([batch])
    assert relative_error(found.aux, expected.aux) < 1e-4
    assert relative_error(found.last, expected.last) < 1e-4
    assert torch.equal(found.target_argmax, expected.target_argmax)
