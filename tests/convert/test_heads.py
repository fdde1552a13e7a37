"""Heads in the layouts of other projects become ours: the same weights, the same drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.artifacts import ArtifactWriter, open_artifact
from stages.convert.vocabulary import draft_ids
from stages.errors import EagleError
from stages.heads import (
    Eagle3Config,
    Eagle3Head,
    MedusaConfig,
    head_files,
)
from stages.targets import Target
from tests.convert.foreign import (
    write_eagle_head,
    write_medusa_heads,
    write_sglang_head,
    write_speculators_head,
)
from tests.convert.heads import (
    SWITCHED,
    assert_same,
    convert,
    load,
    random_head,
    refusal,
)


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def with_ids(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`d2t` holds target ids instead of offsets."""
    return tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


def by_frequency(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft vocabulary in another order than the target's."""
    order = torch.randperm(40)
    ids = (tensors["d2t"] + torch.arange(40))[order]
    return tensors | {"d2t": ids - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]}


def with_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(40, 32)}


Writer = Callable[[Path, Eagle3Head], Path]


LAYOUTS: dict[str, Writer] = {
    "EAGLE, pickled": write_eagle_head,
    "SpecForge": lambda folder, head: write_eagle_head(
        folder, head, pickled=False, architectures=["LlamaForCausalLMEagle3"]
    ),
    "names with a prefix": lambda folder, head: write_eagle_head(folder, head, change=prefixed),
    "ids for offsets": lambda folder, head: write_eagle_head(folder, head, change=with_ids),
    "vocabulary in another order": lambda folder, head: write_eagle_head(folder, head, change=by_frequency),
    "layers as SGLang counts them": lambda folder, head: write_eagle_head(
        folder, head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    ),
    "speculators": lambda folder, head: write_speculators_head(folder, head, None),
    "speculators, default layers": lambda folder, head: write_speculators_head(
        folder, head, None, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
    ),
    "speculators, copies of the target": lambda folder, head: write_speculators_head(
        folder, head, None, change=with_copies
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_has_the_same_weights_and_drafts_after_conversion(
    layout: str, target: Target, path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    source = LAYOUTS[layout](tmp_path / "theirs", head)
    convert(source, tmp_path / "ours", path)
    artifact = open_artifact(str(tmp_path / "ours"), "head")
    artifact.require_target(target.fingerprint)
    converted = load(tmp_path / "ours")
    assert converted.config == head.config
    assert_same(converted, head)


def test_a_speculators_head_names_its_target(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_speculators_head(tmp_path / "theirs", head, verifier=path)
    convert(source, tmp_path / "ours", None)
    assert_same(load(tmp_path / "ours"), head)
    nameless = write_speculators_head(tmp_path / "nameless", head, verifier=None)
    assert "give --target" in refusal(nameless, tmp_path / "x", None)


def test_a_head_trained_anew_is_not_taken_for_the_one_that_is_there(
    path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head), tmp_path / "ours", path)
    again = convert(tmp_path / "theirs", tmp_path / "ours", path)
    assert "already complete" in again.summary()
    anew = write_eagle_head(
        tmp_path / "anew", head, change=lambda tensors: tensors | {"norm.weight": torch.ones(32)}
    )
    with pytest.raises(EagleError, match="made with other settings"):
        convert(anew, tmp_path / "ours", path)


def test_weights_in_several_files_are_one_head(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, pickled=False)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(parts.values()):
        mine = {name: tensors[name] for name in tensors if parts[name] == part}
        safetensors.torch.save_file(mine, source / part)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    convert(source, tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), head)


def test_the_whole_vocabulary_needs_no_map(target: Target, path: str, tmp_path: Path) -> None:
    config = Eagle3Config.from_target(target.config, 300).model_copy(update={"torch_dtype": "float32"})
    whole = random_head(config, target)
    source = write_eagle_head(
        tmp_path / "theirs",
        whole,
        change=lambda tensors: {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")},
    )
    convert(source, tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), whole)


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},  # vLLM's field counts inputs of layers
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},  # SGLang's their outputs
    ],
)
def test_other_feature_layers_go_along(
    config: dict[str, Any], path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head, **config), tmp_path / "ours", path)
    assert load(tmp_path / "ours").config.feature_layers == (1, 3, 6)


def test_a_head_in_half_precision_stays_in_it_unless_told(
    path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}

    source = write_eagle_head(tmp_path / "theirs", head, change=half)
    for name, dtype, stored in (("as-is", "auto", torch.float16), ("wide", "float32", torch.float32)):
        convert(source, tmp_path / name, path, dtype=dtype)
        tensors = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert {each.dtype for each in tensors.values() if each.is_floating_point()} == {stored}
        assert torch.equal(tensors["fc.weight"].float(), head.fc.weight.half().float())


@pytest.mark.parametrize(
    ("changes", "write"),
    [
        ({"norm_before_residual": True, "norm_before_fc": True}, write_speculators_head),
        (SWITCHED, write_speculators_head),
        (SWITCHED, write_sglang_head),
        ({"sliding_window": 3}, write_eagle_head),
    ],
)
def test_variants_of_eagle3_go_along(
    changes: dict[str, Any], write: Callable[..., Path], target: Target, path: str, tmp_path: Path
) -> None:
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"torch_dtype": "float32"} | changes
    )
    made = random_head(config, target)
    switches = {
        name: value for name, value in changes.items() if name.startswith("norm") or name == "fc_norm"
    }
    if write is write_speculators_head:
        source = write(tmp_path / "theirs", made, path, **switches)
        raw = json.loads((source / "config.json").read_text())
        raw["transformer_layer_config"]["num_hidden_layers"] = config.num_hidden_layers
        (source / "config.json").write_text(json.dumps(raw))
    elif write is write_eagle_head:
        source = write(tmp_path / "theirs", made, layer_types=["sliding_attention"], sliding_window=3)
    else:
        source = write(tmp_path / "theirs", made)
    convert(source, tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert converted.config == config
    assert_same(converted, made)


@pytest.mark.parametrize("changes", [{}, SWITCHED, {"sliding_window": 3}, {"feature_layers": (1, 3, 6)}])
def test_speculators_format_holds_the_same_head(
    changes: dict[str, Any], target: Target, path: str, tmp_path: Path
) -> None:
    """Written from a head of ours, it names its target, loads here, and converts back."""
    linear = {"rope_type": "linear", "factor": 2.0}
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"torch_dtype": "float32", "rope_theta": 5e4, "rope_scaling": linear} | changes
    )
    made = random_head(config, target)
    with ArtifactWriter.open(str(tmp_path / "head"), "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(made).items():
            writer.add_file(name, data)
        writer.finish({})
    convert(tmp_path / "head", tmp_path / "theirs-now", None, to="speculators")
    assert_same(load(tmp_path / "theirs-now"), made)
    assert load(tmp_path / "theirs-now").config == config
    raw = json.loads((tmp_path / "theirs-now" / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3Speculator"]
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": path,
        "architectures": ["LlamaForCausalLM"],
    }
    tensors = safetensors.torch.load_file(tmp_path / "theirs-now" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert not any(name.startswith("midlayer") for name in tensors)
    (tmp_path / "theirs-now" / "manifest.json").unlink()
    convert(tmp_path / "theirs-now", tmp_path / "again", None)
    assert_same(load(tmp_path / "again"), made)
    assert load(tmp_path / "again").config == config


def test_what_speculators_format_cannot_hold_is_refused(target: Target, path: str, tmp_path: Path) -> None:
    medusa = random_head(MedusaConfig.from_target(target.config, 300), target)
    source = write_medusa_heads(tmp_path / "theirs", medusa, path)
    assert "no format for heads of kind medusa" in refusal(source, tmp_path / "x", path, to="speculators")
    eagle3 = random_head(Eagle3Config.from_target(target.config, 40), target)
    with ArtifactWriter.open(str(tmp_path / "head"), "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(eagle3).items():
            writer.add_file(name, data)
        writer.finish({})
    complaint = refusal(tmp_path / "head", tmp_path / "x", "builtin:smollm2", to="speculators")
    assert "builtin:smollm2 means nothing to other tools" in complaint
    assert "use it as it is, or say --to speculators" in refusal(tmp_path / "head", tmp_path / "x", path)


def test_the_rope_of_a_head_is_the_one_its_config_says(target: Target, path: str, tmp_path: Path) -> None:
    scaled = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "torch_dtype": "float32"}
    )
    made = Eagle3Head(scaled)
    inverse = {"midlayer.self_attn.rotary_emb.inv_freq": made.rotary.frequencies}
    source = write_eagle_head(
        tmp_path / "theirs",
        made,
        change=lambda tensors: tensors | inverse,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    convert(source, tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert converted.config == scaled
    assert torch.equal(converted.rotary.frequencies, made.rotary.frequencies)
    plain = write_eagle_head(tmp_path / "plain", made)
    config = json.loads((plain / "config.json").read_text())
    del config["rope_theta"]
    (plain / "config.json").write_text(json.dumps(config))
    convert(plain, tmp_path / "default", path)
    assert load(tmp_path / "default").config.rope_theta == 10000.0


@given(st.sets(st.integers(0, 60), min_size=1, max_size=40), st.booleans())
def test_both_ways_to_store_a_vocabulary_give_the_same_ids(chosen: set[int], as_ids: bool) -> None:
    ids = torch.tensor(sorted(chosen))
    covered = torch.zeros(61, dtype=torch.bool)
    covered[ids] = True
    stored = ids if as_ids else ids - torch.arange(len(ids))
    assert torch.equal(draft_ids(stored, covered, 61, "here"), ids)


def test_a_vocabulary_that_can_be_read_in_two_ways_is_refused() -> None:
    ids = torch.tensor([0, 2, 5])
    with pytest.raises(EagleError, match="no t2d to tell"):
        draft_ids(ids, None, 61, "here")
    assert torch.equal(draft_ids(torch.tensor([3, 3, 4]), None, 61, "here"), torch.tensor([3, 4, 6]))
    assert torch.equal(draft_ids(torch.tensor([10, 40, 60]), None, 61, "here"), torch.tensor([10, 40, 60]))
