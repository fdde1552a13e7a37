"""Heads' folders against what SGLang's loaders read of them; vLLM loads them for real in tests/vllm.

SGLang drops tensors of names it does not know without a word, and drafts with random weights in their place.
So its reading is written down here: which parameters it has for a config, which name of a file goes where,
and what it takes from `config.json`. See its `models/llama_eagle3.py`, `models/llama_eagle.py`,
`models/llama.py` (`set_eagle3_layers_to_capture`) and `model_executor/model_runner.py`. It has no Medusa.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from stages.heads import HeadOptions, head_files, left_out_by_sglang, make_head
from stages.heads.sglang import ARCHITECTURES

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
        h, wide = c["hidden_size"], 3 * c["target_hidden_size"]
        found = {
            ("model.embed_tokens.weight", ""): (c["vocab_size"], h),
            ("model.fc.weight", ""): (h, wide),
            **self.layer("model.midlayer", 2 * h, ("input_layernorm", "hidden_norm")),
            ("model.norm.weight", ""): (h,),
            ("lm_head.weight", ""): (c["draft_vocab_size"], h),
        }
        for number in range(c["num_hidden_layers"] - 1):
            found |= self.layer(f"model.additional_layers.{number}", h, ("hidden_norm",))
        return found

    def layer(self, name: str, width: int, norms: tuple[str, ...]) -> dict[tuple[str, str], tuple[int, ...]]:
        """Of a decoder layer whose attention is given so wide an input."""
        c = self.config
        h, inner = c["hidden_size"], c["intermediate_size"]
        q, kv = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
        return {
            (f"{name}.self_attn.qkv_proj.weight", "q"): (q, width),
            (f"{name}.self_attn.qkv_proj.weight", "k"): (kv, width),
            (f"{name}.self_attn.qkv_proj.weight", "v"): (kv, width),
            (f"{name}.self_attn.o_proj.weight", ""): (h, q),
            (f"{name}.mlp.gate_up_proj.weight", "gate"): (inner, h),
            (f"{name}.mlp.gate_up_proj.weight", "up"): (inner, h),
            (f"{name}.mlp.down_proj.weight", ""): (h, inner),
            **{(f"{name}.{norm}.weight", ""): (h,) for norm in (*norms, "post_attention_layernorm")},
        }

    @property
    def left_random(self) -> set[str]:
        """Parameters that no tensor of the file fills."""
        return {name for name, part in self.shapes.keys() - self.filled.keys()}

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


class Sglang1(Sglang):
    """Its EAGLE-1, where `fc` has a bias, the first layer no norm, and the target's output layer is used."""

    @property
    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        c = self.config
        h = c["hidden_size"]
        found = {
            ("model.embed_tokens.weight", ""): (c["vocab_size"], h),
            ("model.fc.weight", ""): (h, 2 * h),
            ("model.fc.bias", ""): (h,),
        }
        for number in range(c["num_hidden_layers"]):
            found |= self.layer(f"model.layers.{number}", h, ("input_layernorm",) if number else ())
        return found


def sglang(head: Any, reader: type[Sglang] = Sglang) -> Sglang:
    files = head_files(head)
    read = reader(json.loads(files["config.json"]))
    read.load(safetensors.torch.load(files["model.safetensors"]))
    return read


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
    assert config["architectures"][0] in ARCHITECTURES
    assert not config["tie_word_embeddings"]  # else its lm_head is the embedding
    loaded = AutoConfig.for_model(**config)
    assert loaded.draft_vocab_size == 40
    assert loaded.rope_parameters["rope_theta"] == 50000.0


@pytest.mark.parametrize("layers", [None, (2, 6, 9), (1, 5, 10)])
def test_features_are_taken_where_training_took_them(layers: tuple[int, int, int] | None) -> None:
    reader = sglang(make_head("eagle3", TARGET, 40, feature_layers=layers))
    assert reader.captured_layers == (layers or (2, 6, 9))


PLAIN = HeadOptions()
VARIANTS = {
    "layers behind the first": replace(PLAIN, layers=2),
    "sliding_window": replace(PLAIN, sliding_window=8),
    "norm_before_residual": replace(PLAIN, norm_before_residual=True),
    "norm_before_fc": replace(PLAIN, norm_before_fc=True),
    "fc_norm": replace(PLAIN, fc_norm=True),
    "norm_output": replace(PLAIN, norm_output=True),
}
KNOWN = {*READ, "eagle_config", "attention_bias", "mlp_bias", "eagle_aux_hidden_state_layer_ids"}
"""Fields of config.json that change nothing, or what SGLang reads; the last one is vLLM's."""


@pytest.mark.parametrize("left_out", [None, *VARIANTS])
def test_what_it_leaves_out_of_a_head_is_known(left_out: str | None) -> None:
    """vLLM has places for all of it; to SGLang these heads must not be given."""
    head = make_head("eagle3", TARGET, 40, options=VARIANTS[left_out] if left_out else PLAIN)
    plain = sglang(make_head("eagle3", TARGET, 40))
    reader = sglang(head)
    unread = {name for name, value in reader.config.items() if plain.config.get(name) != value} - KNOWN
    assert bool(reader.dropped or reader.left_random or unread) == (left_out is not None)
    assert left_out_by_sglang(head.config) == ((left_out,) if left_out else ())


def test_the_tensors_that_it_drops_have_known_names() -> None:
    dropped = {name: sglang(make_head("eagle3", TARGET, 40, options=o)) for name, o in VARIANTS.items()}
    assert dropped["fc_norm"].dropped == {f"fc_norm.{tap}.weight" for tap in range(3)}
    assert dropped["norm_before_fc"].dropped == {"input_norm.weight"}
    further = dropped["layers behind the first"]
    assert {name.split(".")[0] for name in further.dropped} == {"layers"}
    assert {".".join(name.split(".")[:2]) for name in further.left_random} == {"model.additional_layers"}


def test_heads_of_other_kinds_are_not_for_it() -> None:
    """It fills all of an EAGLE-1 head but a bias, but does not know its name; of Medusa it has nothing."""
    for layers in (1, 2):
        head = make_head("eagle1", TARGET, 40, options=HeadOptions(layers=layers))
        reader = sglang(head, Sglang1)
        found = {key: tuple(tensor.shape) for key, tensor in reader.filled.items()}
        assert found.items() <= reader.shapes.items()
        assert not reader.dropped
        assert reader.left_random == {"model.fc.bias"}
        assert left_out_by_sglang(head.config)
        assert reader.config["architectures"][0] not in ARCHITECTURES
    medusa = make_head("medusa", TARGET, 40)
    assert left_out_by_sglang(medusa.config)
    assert json.loads(head_files(medusa)["config.json"])["architectures"][0] not in ARCHITECTURES
