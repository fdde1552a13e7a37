"""The EAGLE-3 head: names, vocabulary map, RoPE, and the folder that engines load."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from stages.artifacts import ArtifactWriter, open_artifact
from stages.errors import EagleError
from stages.heads import Eagle3Config, Eagle3Head, head_files, init_from_target, load_head
from stages.heads.rotary import RotaryEmbedding

CONFIG = Eagle3Config(
    hidden_size=64,
    target_hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # not hidden / heads
    intermediate_size=96,
    vocab_size=300,
    draft_vocab_size=40,
    rope_theta=50000.0,
)
PUBLISHED = {
    "embed_tokens.weight": (300, 64),
    "fc.weight": (64, 192),
    "midlayer.self_attn.q_proj.weight": (128, 128),
    "midlayer.self_attn.k_proj.weight": (64, 128),
    "midlayer.self_attn.v_proj.weight": (64, 128),
    "midlayer.self_attn.o_proj.weight": (64, 128),
    "midlayer.mlp.gate_proj.weight": (96, 64),
    "midlayer.mlp.up_proj.weight": (96, 64),
    "midlayer.mlp.down_proj.weight": (64, 96),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.post_attention_layernorm.weight": (64,),
    "norm.weight": (64,),
    "lm_head.weight": (40, 64),
    "d2t": (40,),
    "t2d": (300,),
}


def write_head(uri: str, files: dict[str, bytes]) -> str:
    with ArtifactWriter.open(uri, "head", {}, overwrite=True) as writer:
        for name, data in files.items():
            writer.add_file(name, data)
        writer.finish({})
    return uri


def test_the_saved_folder_has_the_published_names_shapes_and_switches() -> None:
    files = head_files(Eagle3Head(CONFIG))
    tensors = safetensors.torch.load(files["model.safetensors"])
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == PUBLISHED
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].dtype == torch.bfloat16
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[switch] is False
    assert not any("layer_id" in key or "aux" in key for key in config)
    assert config["rope_theta"] == 50000.0
    assert config["head_dim"] == 32


def test_a_head_survives_saving_and_loading(tmp_path) -> None:
    head = Eagle3Head(CONFIG)
    head.set_vocabulary(torch.arange(0, 300, 7)[:40])
    loaded = load_head(
        open_artifact(write_head(str(tmp_path / "head"), head_files(head)), "head"),
        dtype=torch.bfloat16,
        device="cpu",
    )
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update({"midlayer.extra": torch.zeros(1)}), "unknown midlayer.extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"norm.weight has shape \(3,\), not \(64,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, complaint: str) -> None:
    files = head_files(Eagle3Head(CONFIG))
    tensors = safetensors.torch.load(files["model.safetensors"])
    change(tensors)
    files["model.safetensors"] = safetensors.torch.save(tensors)
    with pytest.raises(EagleError, match=complaint):
        load_head(open_artifact(write_head(str(tmp_path), files), "head"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not supported"),
        ({"fc_norm": True}, "fc_norm=true"),
        ({"num_hidden_layers": 2}, "2 layers"),
    ],
)
def test_heads_of_another_kind_are_refused(change: dict, complaint: str) -> None:
    with pytest.raises(EagleError, match=complaint):
        Eagle3Config.from_hf(CONFIG.to_hf() | change)


def test_other_feature_layers_are_named_for_each_engine_as_it_reads_them() -> None:
    target = LlamaConfig(num_hidden_layers=12)
    assert Eagle3Config.from_target(target, 40, (2, 6, 9)) == Eagle3Config.from_target(target, 40)
    config = Eagle3Config.from_target(target, 40, (1, 5, 11))
    assert config.feature_layers == (1, 5, 11)
    files = json.loads(json.dumps(config.to_hf()))
    assert files["eagle_aux_hidden_state_layer_ids"] == [1, 5, 11], "vLLM: states entering these layers"
    assert files["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 4, 10], "SGLang: leaving these"
    assert Eagle3Config.from_hf(files) == config
    del files["eagle_aux_hidden_state_layer_ids"]
    assert Eagle3Config.from_hf(files) == config
    with pytest.raises(EagleError, match="feature_layers"):
        Eagle3Config.from_hf(files | {"eagle_aux_hidden_state_layer_ids": [1, 5]})


def test_the_vocabulary_map_holds_offsets_and_its_invariant() -> None:
    head, ids = Eagle3Head(CONFIG), torch.randperm(300)[:40].sort().values
    head.set_vocabulary(ids)
    assert torch.equal(head.draft_ids, ids)
    assert torch.equal(head.t2d.nonzero()[:, 0], head.d2t + torch.arange(40))
    for wrong in (ids.flip(0), ids[:39], torch.zeros(40, dtype=torch.int64)):
        with pytest.raises(ValueError, match="ascending"):
            head.set_vocabulary(wrong)


def test_initialising_from_the_target_takes_the_rows_of_the_draft_vocabulary() -> None:
    head = Eagle3Head(CONFIG)
    head.set_vocabulary(torch.arange(5, 45))
    weights = {"embed_tokens.weight": torch.randn(300, 64), "norm.weight": torch.randn(64)}
    init_from_target(head, weights)
    assert torch.equal(head.lm_head.weight, weights["embed_tokens.weight"][5:45])  # tied
    assert torch.equal(head.norm.weight, weights["norm.weight"])
    init_from_target(head, weights | {"lm_head.weight": torch.ones(300, 64)})
    assert torch.equal(head.lm_head.weight, torch.ones(40, 64))
    assert not head.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 50000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_the_head_turns_with_the_position_as_the_target_does(rope: dict) -> None:
    target = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        intermediate_size=96,
        vocab_size=300,
        rope_parameters=rope,
        max_position_embeddings=512,
    )
    config = Eagle3Config.from_target(target, 40)
    assert config == Eagle3Config.from_target(json.loads(target.to_json_string()), 40)
    assert config == Eagle3Config.from_hf(json.loads(json.dumps(config.to_hf())))
    x, positions = torch.randn(1, 200, 4, 32), torch.arange(200)[None]
    cos, sin = LlamaRotaryEmbedding(target)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(RotaryEmbedding(config)(x, positions), expected)


def test_the_stated_size_is_that_of_the_trained_parameters() -> None:
    trained = sum(p.numel() for p in Eagle3Head(CONFIG).parameters() if p.requires_grad)
    assert CONFIG.num_parameters == trained


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}])
def test_a_loaded_head_turns_by_unrounded_angles(tmp_path, scaling: dict | None) -> None:
    """Rounded to bfloat16 the frequencies are off by radians at a few hundred tokens."""
    config = CONFIG.model_copy(update={"rope_scaling": scaling})
    artifact = open_artifact(write_head(str(tmp_path / "head"), head_files(Eagle3Head(config))), "head")
    loaded = load_head(artifact, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(loaded.rotary.frequencies, RotaryEmbedding(config).frequencies)
    assert loaded.rotary.frequencies.dtype == torch.float32


def test_a_target_whose_config_is_not_like_llamas_is_refused_by_name() -> None:
    config = GPT2Config(n_layer=8)
    with pytest.raises(EagleError, match="for a gpt2 target, its config has no "):
        Eagle3Config.from_target(config.to_dict(), 40)
