"""A loaded target: model, tokenizer, chat template, identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.artifacts import TargetFingerprint
from stages.errors import EagleError
from stages.targets.attention import SLOT_ATTENTION
from stages.targets.fingerprint import fingerprint
from stages.targets.resolve import resolve_target
from stages.targets.taps import eagle3_feature_layers


@dataclass(frozen=True)
class Target:
    """A causal language model of transformers with what the stages need to know of it.

    The model's attention goes through ``stages.targets.attention``: plain calls behave as with sdpa.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The stack of decoder layers with embedding and final norm; its output is the state after that
        norm."""
        return self.model.get_decoder()

    @cached_property
    def fingerprint(self) -> TargetFingerprint:
        return fingerprint(self.name, self.model, self.config, self.tokenizer, self.dtype)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of the generation config, and the tokenizer's end of sequence."""
        ids = self.model.generation_config.eos_token_id
        listed = [ids] if isinstance(ids, int) else list(ids or [])
        return frozenset(i for i in (*listed, self.tokenizer.eos_token_id) if i is not None)

    @property
    def max_length(self) -> int:
        """Context length in tokens.

        Where RoPE changes with the length of the input (longrope, dynamic) the length before the change:
        beyond, a token's state would depend on what is decoded beside it.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        longest = self.config.max_position_embeddings
        if rope.get("rope_type") in ("longrope", "dynamic"):
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
        return longest

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        """EAGLE-3's tap layers. Raises EagleError for a target of fewer than seven layers."""
        return eagle3_feature_layers(self.config.num_hidden_layers)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat through the target's own template.

        Raises:
            EagleError: the target has no chat template, or the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise EagleError(
                f"target {self.name} has no chat template; use an instruct model, or add chat_template.jinja"
            )
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            raise EagleError(f"the chat template of {self.name} refuses the messages: {error}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] in the model's dtype, of states [..., h] after the final norm."""
        logits = self.model.get_output_embeddings()(last)
        if (scale := logit_scale(self.config)) != 1:
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits


def logit_scale(config: Any) -> float:
    """What a target multiplies its logits by: Cohere's ``logit_scale``, over Granite's ``logits_scaling``."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


def load_target(name: str, device: str = "auto", dtype: str = "auto") -> Target:
    """Load a target for inference.

    Args:
        name: a hub id, a model folder, a ``.gguf`` file or ``builtin:smollm2``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``.
        dtype: ``auto`` (bfloat16), ``bfloat16``, ``float32``.

    Raises:
        EagleError: it cannot be found, is not a causal language model, or the device is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = choose_device(device)
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    source = resolve_target(name)
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, **gguf)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=kind, attn_implementation=SLOT_ATTENTION, **gguf
        )
        _refuse_unknown_layers(name, model)
        model = model.to(where).eval().requires_grad_(False)
    except EagleError:
        raise
    except Exception as error:  # what broken or foreign files raise has no common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if not Path(source.path).exists():
            reason = f"it is no local folder, and the hub does not give it: {reason}"
        raise EagleError(f"cannot load target {name}: {reason}") from error
    return Target(name=name, model=model, tokenizer=tokenizer, device=where, dtype=kind)


def _refuse_unknown_layers(name: str, model: Any) -> None:
    """Decoding keeps keys and values of attention layers, and nothing else."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "kv_lora_rank", None):
        kinds.add("latent_attention")
    if not getattr(model, "_supports_attention_backend", False):
        raise EagleError(
            f"target {name} is a {type(model).__name__}, whose attention cannot be replaced in transformers; "
            "use another target"
        )
    if kinds or not hasattr(model.get_decoder(), "layers"):
        what = ", ".join(sorted(kinds)) or f"the layers of {type(model).__name__}"
        raise EagleError(f"target {name} has {what}; targets need layers of full or sliding attention only")


def choose_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one. Raises EagleError: ``cuda`` without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EagleError("--device cuda, but torch sees no GPU; use --device cpu")
    return torch.device(name)
