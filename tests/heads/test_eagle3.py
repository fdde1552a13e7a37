"""The EAGLE-3 head: names, switches, vocabulary map, RoPE, and the folder that engines load."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch.nn.functional import rms_norm
from transformers import GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.heads import Eagle3Config, Eagle3Head, HeadOptions, head_files, load_head, read_config
from stages.heads.rotary import RotaryEmbedding
from tests.heads.folders import write_head

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
SECOND_LAYER = {
    "layers.1.self_attn.q_proj.weight": (128, 64),
    "layers.1.self_attn.k_proj.weight": (64, 64),
    "layers.1.self_attn.v_proj.weight": (64, 64),
    "layers.1.self_attn.o_proj.weight": (64, 128),
    "layers.1.mlp.gate_proj.weight": (96, 64),
    "layers.1.mlp.up_proj.weight": (96, 64),
    "layers.1.mlp.down_proj.weight": (64, 96),
    "layers.1.input_layernorm.weight": (64,),
    "layers.1.post_attention_layernorm.weight": (64,),
}


def changed(**fields: object) -> Eagle3Config:
    return CONFIG.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {}),
        ({"num_hidden_layers": 2}, SECOND_LAYER),
        ({"fc_norm": True}, {f"fc_norm.{i}.weight": (64,) for i in range(3)}),
        ({"norm_before_fc": True}, {"input_norm.weight": (192,)}),
        ({"norm_output": True, "norm_before_residual": True}, {}),
    ],
)
def test_the_saved_folder_has_the_names_shapes_and_switches_that_vllm_loads(
    fields: dict[str, object], more: dict[str, tuple[int, ...]]
) -> None:
    files = head_files(Eagle3Head(changed(**fields)))
    tensors = safetensors.torch.load(files["model.safetensors"])
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == PUBLISHED | more
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].dtype == torch.bfloat16
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False
    expected: dict[str, object] = {"num_hidden_layers": 1}
    expected |= dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    assert {name: config[name] for name in expected} == expected | fields
    assert not any("layer_id" in key or "aux" in key or "sliding" in key for key in config)
    assert config["rope_theta"] == 50000.0
    assert config["head_dim"] == 32
    assert read_config(config) == changed(**fields)


def test_a_sliding_window_is_named_where_vllm_looks_for_it() -> None:
    config = changed(num_hidden_layers=2, sliding_window=64)
    files = json.loads(json.dumps(config.to_hf()))
    assert files["layer_types"] == ["sliding_attention"] * 2
    assert files["sliding_window"] == 64
    assert read_config(files) == config
    # As in vLLM, the number alone is no window: Llama configs have one for show.
    assert read_config(CONFIG.to_hf() | {"sliding_window": 64}) == CONFIG
    with pytest.raises(EagleError, match="layer_types full_attention, sliding_attention"):
        read_config(files | {"layer_types": ["full_attention", "sliding_attention"]})


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], weight, CONFIG.rms_norm_eps)


def test_the_switches_put_norms_where_vllm_has_them() -> None:
    """Which norms there are, and what they are taken of, by hand."""
    torch.manual_seed(0)
    switches = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True)
    head = Eagle3Head(changed(**switches))
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    aux, feature, embeds, hidden = torch.randn(192), torch.randn(64), torch.randn(64), torch.randn(64)
    gains = {name: parameter for name, parameter in head.named_parameters() if parameter.dim() == 1}

    parts = normed(aux, gains["input_norm.weight"]).chunk(3)
    fused = torch.cat([normed(part, gains[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
    torch.testing.assert_close(head.fuse(aux), head.fc.weight @ fused)

    x, residual = head.enter(embeds, feature)
    expected = normed(feature, gains["midlayer.hidden_norm.weight"])
    torch.testing.assert_close(residual, expected)
    input_norm = gains["midlayer.input_layernorm.weight"]
    torch.testing.assert_close(x, torch.cat([normed(embeds, input_norm), expected]))

    torch.testing.assert_close(head.feedback(hidden), normed(hidden, gains["norm.weight"]))
    torch.testing.assert_close(
        head.logits(hidden), head.lm_head.weight @ normed(hidden, gains["norm.weight"])
    )
    plain = Eagle3Head(CONFIG)
    assert plain.feedback(hidden) is hidden
    assert plain.enter(embeds, feature)[1] is feature
    torch.testing.assert_close(plain.fuse(aux), plain.fc.weight @ aux)


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
    for wrong in (ids.flip(0), ids[:39], torch.zeros(40, dtype=torch.int64), torch.arange(270, 310)):
        with pytest.raises(ValueError, match="ascending"):
            head.set_vocabulary(wrong)


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


def test_options_shape_the_head() -> None:
    target = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=12)
    config = Eagle3Config.from_target(
        target, 40, options=HeadOptions(layers=2, head_dim=24, sliding_window=128, fc_norm=True)
    )
    assert (config.num_hidden_layers, config.head_dim, config.sliding_window) == (2, 24, 128)
    assert config.fc_norm
    assert not config.norm_output
    with pytest.raises(EagleError, match="heads 5 means nothing to a head of kind eagle3"):
        Eagle3Config.from_target(target, 40, options=HeadOptions(heads=5))
