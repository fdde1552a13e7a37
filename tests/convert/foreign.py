"""Hidden states and heads in the layouts of other projects, written from what their readers take.

speculators: `hidden_states` [T, 4, h], the last from before the final norm, and `token_ids` in a safetensors
file a row; masks in a dataset of the `datasets` library. Up to 0.4: torch pickles with a list of four states,
each the output of a layer. SpecForge: torch pickles, states with a leading dimension of one, the last after
the norm.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import safetensors.torch
import torch
from torch import Tensor

from stages.heads import Eagle1Head, Eagle3Head, MedusaHead
from stages.targets import Target

LINE_BREAK = 10  # any token that a template puts behind the end of a turn


@dataclass(frozen=True)
class Chat:
    """A row as our own pipeline has it, and the mask that a tool makes which marks answers in the text."""

    input_ids: list[int]
    loss_mask: list[int]
    text_mask: list[int]


def chat(turns: Sequence[tuple[int, int]], target: Target, seed: int, finished: bool = True) -> Chat:
    """Random tokens: `turns` of (tokens of the prompt, of the answer), each answer with its end of turn."""
    generator = torch.Generator().manual_seed(seed)
    (end,) = target.eos_ids
    ids: list[int] = []
    ours: list[int] = []
    theirs: list[int] = []
    for number, (prompt, answer) in enumerate(turns):
        last = number == len(turns) - 1
        ids += torch.randint(0, end, (prompt + answer,), generator=generator).tolist()
        ours += [0] * prompt + [1] * answer
        theirs += [0] * prompt + [1] * answer
        if finished or not last:
            ids += [end, LINE_BREAK]
            ours += [1, 0]
            theirs += [
                1,
                1 if last else 0,
            ]  # nothing follows the last line break, so a text mask takes it along
    return Chat(ids, ours, theirs)


@dataclass(frozen=True)
class AllStates:
    """What a target computes of a row: the residual stream at every layer boundary, and after the norm."""

    inputs: list[Tensor]  # of layer 0, 1, ... L-1, then the output of the last layer; each [T, h]
    normed: Tensor  # [T, h]


@torch.no_grad()
def all_states(target: Target, input_ids: Sequence[int]) -> AllStates:
    before: list[Tensor] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda module, args: before.append(args[0][0]))
    shown = target.model(torch.tensor([input_ids]), output_hidden_states=True)
    hook.remove()
    states = [each[0] for each in shown.hidden_states]
    return AllStates([*states[:-1], before[0]], states[-1])


def write_speculators(
    folder: Path, target: Target, chats: Sequence[Chat], numbers: Sequence[int] | None = None
) -> Path:
    """The dataset with `hidden_states/hs_<n>.safetensors` in it; returns the folder."""
    rows = {
        "input_ids": [each.input_ids for each in chats],
        "loss_mask": [each.text_mask for each in chats],
        "seq_len": [len(each.input_ids) for each in chats],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(folder, num_shards=min(3, len(chats)))
    (folder / "hidden_states").mkdir()
    low, mid, high = target.feature_layers
    for number in range(len(chats)) if numbers is None else numbers:
        states = all_states(target, chats[number].input_ids)
        stacked = torch.stack([states.inputs[layer] for layer in (low, mid, high, -1)], dim=1)
        tensors = {"hidden_states": stacked, "token_ids": torch.tensor(chats[number].input_ids)}
        safetensors.torch.save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


def write_speculators_pickles(
    folder: Path, target: Target, chats: Sequence[Chat], layers: tuple[int, int, int] | None = None
) -> Path:
    """`data_<n>.pt`; `layers` whose outputs to take, when others than the tool's own are chosen."""
    folder.mkdir(parents=True)
    depth = target.config.num_hidden_layers
    low, mid, high = layers or (2, depth // 2, depth - 3)
    if layers:
        settings = {"version": "2.0", "hidden_states": {"layer_ids": [low, mid, high, depth - 1]}}
        (folder / "data_config.json").write_text(json.dumps(settings))
    for number, each in enumerate(chats):
        states = all_states(target, each.input_ids)
        content = {
            "input_ids": torch.tensor(each.input_ids),
            "hidden_states": [states.inputs[layer + 1].contiguous() for layer in (low, mid, high, depth - 1)],
            "loss_mask": torch.tensor(each.text_mask),
        }
        torch.save(content, folder / f"data_{number}.pt")
    return folder


def write_specforge(
    folder: Path, target: Target, chats: Sequence[Chat], *, packed: bool = False, padding: int = 0
) -> Path:
    """`rows_0-4/data_<n>.ckpt[.gz]`, rows followed by `padding` tokens as in a batch of longer ones."""
    group = 4
    for number, each in enumerate(chats):
        start = number // group * group
        states = all_states(target, each.input_ids)
        aux = torch.cat([states.inputs[layer] for layer in target.feature_layers], dim=-1)
        content = {
            "input_ids": torch.tensor(each.input_ids + [0] * padding),
            "loss_mask": torch.tensor(each.text_mask + [0] * padding),
            "aux_hidden_state": _padded(aux, padding)[None],
            "hidden_state": _padded(states.normed, padding)[None],
        }
        data = saved(content)
        path = folder / f"rows_{start}-{start + group}" / f"data_{number}.ckpt{'.gz' if packed else ''}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if packed else data)
    return folder


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _padded(states: Tensor, padding: int) -> Tensor:
    return torch.cat([states, torch.full((padding, states.shape[1]), 7.0, dtype=states.dtype)])


Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def write_eagle_head(
    folder: Path, head: Eagle3Head, *, pickled: bool = True, change: Rename = dict, **config: Any
) -> Path:
    """As EAGLE's own trainer and SpecForge write heads: no embeddings, a Llama config with few fields."""
    tensors = {name: tensor for name, tensor in head.state_dict().items() if "embed" not in name}
    ours = head.config
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_key_value_heads,
        "num_hidden_layers": ours.num_hidden_layers,
        "rms_norm_eps": ours.rms_norm_eps,
        "vocab_size": ours.vocab_size,
        "draft_vocab_size": ours.draft_vocab_size,
        "max_position_embeddings": ours.max_position_embeddings,
        "rope_theta": ours.rope_theta,
        "head_dim": ours.head_dim,
        "torch_dtype": "float16",
    }
    return _write_head(folder, change(tensors), settings | config, pickled=pickled)


def write_speculators_head(
    folder: Path, head: Eagle3Head, verifier: str | None, *, change: Rename = dict, **config: Any
) -> Path:
    """As speculators writes heads: layer 0 for the middle layer, the layer's config without its defaults."""
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.state_dict().items()}
    ours = head.config
    layer = {
        "model_type": "llama",
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_key_value_heads,
        "num_hidden_layers": 1,
        "head_dim": ours.head_dim,
        "vocab_size": ours.vocab_size,
        "rms_norm_eps": ours.rms_norm_eps,
        "max_position_embeddings": ours.max_position_embeddings,
        "rope_parameters": {"rope_theta": ours.rope_theta, "rope_type": "default"},
    }
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": ours.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
    }
    return _write_head(folder, change(tensors), settings | config, pickled=False)


def write_sglang_head(folder: Path, head: Eagle3Head) -> Path:
    """As SGLang names layers behind the first; the switches as EAGLE-3.1's configs have them."""

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {_sglang_name(name): tensor for name, tensor in tensors.items()}

    switches = {name: getattr(head.config, name) for name in ("fc_norm", "norm_output")}
    return write_eagle_head(
        folder, head, pickled=False, change=renamed, architectures=["LlamaForCausalLMEagle3"], **switches
    )


def _sglang_name(name: str) -> str:
    if not name.startswith("layers."):
        return name
    _, number, rest = name.split(".", 2)
    return f"additional_layers.{int(number) - 1}.{rest.replace('input_layernorm', 'hidden_norm')}"


def write_eagle1_head(
    folder: Path, head: Eagle1Head, *, pickled: bool = True, change: Rename = dict, **config: Any
) -> Path:
    """As EAGLE's first trainer writes heads: a Llama config, embeddings, and nothing of the output layer."""
    beside = ("lm_head.weight", "vocabulary")
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name not in beside}
    ours = head.config
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_key_value_heads,
        "num_hidden_layers": ours.num_hidden_layers,
        "rms_norm_eps": ours.rms_norm_eps,
        "vocab_size": ours.vocab_size,
        "max_position_embeddings": ours.max_position_embeddings,
        "rope_theta": ours.rope_theta,
        "head_dim": ours.head_dim,
    }
    return _write_head(folder, change(tensors), settings | config, pickled=pickled)


def write_medusa_heads(folder: Path, head: MedusaHead, target: str, *, change: Rename = dict) -> Path:
    """As Medusa's trainer writes heads: numbers for names, and a config that counts wrong."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            tensors[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        elif parts[0] == "lm_heads":
            tensors[f"{parts[1]}.{head.config.layers}.weight"] = tensor
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": target}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "medusa_lm_head.pt").write_bytes(saved(change(tensors)))
    return folder


def _write_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], *, pickled: bool) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        (folder / "pytorch_model.bin").write_bytes(saved(tensors))
    else:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(whole, folder / "model.safetensors")
    return folder
