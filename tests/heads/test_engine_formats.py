"""A head's folder against what SGLang's EAGLE-3 loader reads of it; vLLM loads one for real in tests/vllm.

SGLang drops tensors of names it does not know without a word, and drafts with random weights in their place.
So its reading is written down here: which parameters it has for a config, which name of a file goes where,
and what it takes from `config.json`. See its `models/llama_eagle3.py`, `models/llama.py`
(`set_eagle3_layers_to_capture`) and `model_executor/model_runner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from stages.heads import HeadOptions, head_files, make_head

LAYERS = 12
TARGET = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # not 64 / 4
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
)
READ = {
    "architectures": list,
    "model_type": str,
    "vocab_size": int,
    "draft_vocab_size": int,
    "hidden_size": int,
    "target_hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "hidden_act": str,
    "rms_norm_eps": float,
    "rope_theta": float,
    "rope_scaling": (dict, type(None)),
    "max_position_embeddings": int,
    "tie_word_embeddings": bool,
    "torch_dtype": str,
}
"""What is read of config.json, with its types. `eagle_config` besides, see `captured_layers`."""

STACKED = {
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
    ".gate_proj": (".gate_up_proj", "gate"),
    ".up_proj": (".gate_up_proj", "up"),
}


@dataclass
class Sglang:
    """Its parameters, filled as its `load_weights` would."""

    config: Mapping[str, Any]
    filled: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    hot_token_ids: Tensor | None = None

    @property
    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Of each parameter, or of each part of a stacked one."""
        c = self.config
        h, wide, inner = c["hidden_size"], 3 * c["target_hidden_size"], c["intermediate_size"]
        q, kv = (c[f"num_{name}_heads"] * c["head_dim"] for name in ("attention", "key_value"))
        layer = "model.midlayer"
        return {
            ("model.embed_tokens.weight", ""): (c["vocab_size"], h),
            ("model.fc.weight", ""): (h, wide),
            (f"{layer}.self_attn.qkv_proj.weight", "q"): (q, 2 * h),
            (f"{layer}.self_attn.qkv_proj.weight", "k"): (kv, 2 * h),
            (f"{layer}.self_attn.qkv_proj.weight", "v"): (kv, 2 * h),
            (f"{layer}.self_attn.o_proj.weight", ""): (h, q),
            (f"{layer}.mlp.gate_up_proj.weight", "gate"): (inner, h),
            (f"{layer}.mlp.gate_up_proj.weight", "up"): (inner, h),
            (f"{layer}.mlp.down_proj.weight", ""): (h, inner),
            (f"{layer}.input_layernorm.weight", ""): (h,),
            (f"{layer}.hidden_norm.weight", ""): (h,),
            (f"{layer}.post_attention_layernorm.weight", ""): (h,),
            ("model.norm.weight", ""): (h,),
            ("lm_head.weight", ""): (c["draft_vocab_size"], h),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = {name for name, _ in self.shapes}
        for name, tensor in tensors.items():
            if "d2t" in name:
                self.hot_token_ids = tensor + torch.arange(len(tensor))
                continue
            if "t2d" in name:
                continue
            stacked = next(((old, *new) for old, new in STACKED.items() if old in name), None)
            full = name.replace(stacked[0], stacked[1]) if stacked else name
            full = full if full in parameters else f"model.{full}"
            if full in parameters:
                self.filled[full, stacked[2] if stacked else ""] = tensor
            else:
                self.dropped.add(name)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Before which of the target's layers the residual stream is taken."""
        ids = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return (2, LAYERS // 2, LAYERS - 3) if ids is None else tuple(layer + 1 for layer in ids)


def sglang(head: Any) -> Sglang:
    files = head_files(head)
    reader = Sglang(json.loads(files["config.json"]))
    reader.load(safetensors.torch.load(files["model.safetensors"]))
    return reader


def test_every_parameter_is_filled_and_no_tensor_dropped() -> None:
    head = make_head("eagle3", TARGET, 40)
    ids = torch.randperm(300)[:40].sort().values
    head.set_vocabulary(ids)
    reader = sglang(head)
    assert {key: tuple(tensor.shape) for key, tensor in reader.filled.items()} == reader.shapes
    assert not reader.dropped
    assert reader.hot_token_ids is not None
    assert torch.equal(reader.hot_token_ids, ids)


def test_the_config_has_what_is_read_of_it() -> None:
    config = sglang(make_head("eagle3", TARGET, 40)).config
    assert all(isinstance(config[name], kind) for name, kind in READ.items())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not config["tie_word_embeddings"]  # else its lm_head is the embedding
    loaded = AutoConfig.for_model(**config)
    assert loaded.draft_vocab_size == 40
    assert loaded.rope_parameters["rope_theta"] == 50000.0


@pytest.mark.parametrize("layers", [None, (2, 6, 9), (1, 5, 10)])
def test_features_are_taken_where_training_took_them(layers: tuple[int, int, int] | None) -> None:
    reader = sglang(make_head("eagle3", TARGET, 40, feature_layers=layers))
    assert reader.captured_layers == (layers or (2, 6, 9))


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        (HeadOptions(fc_norm=True), {f"fc_norm.{tap}.weight" for tap in range(3)}),
        (HeadOptions(norm_before_fc=True), {"input_norm.weight"}),
    ],
)
def test_what_it_drops_of_heads_with_more_norms_is_known(options: HeadOptions, dropped: set[str]) -> None:
    """vLLM reads them; to SGLang these heads must not be given."""
    assert sglang(make_head("eagle3", TARGET, 40, options=options)).dropped == dropped
