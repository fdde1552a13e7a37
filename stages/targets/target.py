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
from stages.targets.cpu_target import CpuTarget, cpu_target, release_packed
from stages.targets.fingerprint import fingerprint
from stages.targets.hub import at_hand
from stages.targets.placement import input_device
from stages.targets.resolve import resolve_target
from stages.targets.stored import StoredWeights, local_folder
from stages.targets.taps import eagle3_feature_layers

_MULTIPLYING = {"hyperclovax"}
"""Families that multiply by `logits_scaling`; Granite divides."""

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""A warning of transformers' tokenizers."""

_UNBOUNDED = 1 << 20
"""Context in tokens of targets that know no positions."""


class TemplateRefusalError(EagleError):
    """A chat template refuses some messages, such as a system message that it has no place for."""


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

    @cached_property
    def config(self) -> Any:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The stack of decoder layers with embedding and final norm; its output is the state after that
        norm."""
        decoder = self.model.get_decoder()
        return decoder.model if decoder is self.model else decoder

    @cached_property
    def fingerprint(self) -> TargetFingerprint:
        stored = None
        if self.dtype == torch.float16 and (source := resolve_target(self.name)).gguf_file is None:
            stored = StoredWeights.of(local_folder(source.path, self.name))
        return fingerprint(self.name, self.model, self.config, self.tokenizer, self.dtype, stored)

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
        longest = getattr(self.config, "max_position_embeddings", None) or _UNBOUNDED
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat through the target's own template.

        Args:
            tools: the functions that the model may call, where the template knows such.
            continue_final_message: leave the last message open, instead of beginning the next one.
            variables: further ones of the template's, such as `enable_thinking`; see `template_variables`.

        Raises:
            TemplateRefusalError: the template refuses the messages.
            EagleError: the target has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise EagleError(
                f"target {self.name} has no chat template; use an instruct model, or add chat_template.jinja"
            )
        import jinja2

        # The model is not run on what is too long, and whoever asks sees how long it is.
        self.tokenizer.deprecation_warnings[_TOO_LONG] = True
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **(variables or {}),
            )
        except (  # templates also fail on what they expect
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise TemplateRefusalError(
                f"the chat template of {self.name} refuses the messages: {reason}"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def cpu(self) -> CpuTarget | None:
        """What decoding on a CPU goes through; made on first use, beside the weights that the model keeps."""
        return cpu_target(self)

    def release_packed(self) -> int:
        """Let go of the model's own weights that decoding on a CPU has packed, and say how many bytes they
        took: it then needs about the target's size, not twice that.

        Decoding goes on as before. The model's modules cannot be run any more, and fail.
        """
        _ = self.fingerprint  # made of those weights
        return release_packed(self)

    def logits(self, last: Tensor, output: nn.Module | None = None) -> Tensor:
        """Logits [..., V] in the model's dtype, of states [..., h] after the final norm.

        Args:
            output: stands in for the model's own lm_head.
        """
        logits = (output or self.model.get_output_embeddings())(last)
        scale, cap = self._logit_changes
        if scale != 1:
            logits = logits * scale
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def changes_logits(self) -> bool:
        """Whether logits are something else than what the lm_head puts out."""
        return self._logit_changes not in ((1, None), (1, 0))

    @cached_property
    def _logit_changes(self) -> tuple[float, float | None]:
        return logit_scale(self.config), logit_softcap(self.config)


def logit_scale(config: Any) -> float:
    """What a target multiplies its logits by, under the name that its family has for it."""
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    return factor * scaling if getattr(config, "model_type", None) in _MULTIPLYING else factor / scaling


def logit_softcap(config: Any) -> float | None:
    """The bound that a target keeps its logits below by tanh, None for most."""
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if cap := getattr(config, name, None):
            return float(cap)
    return None


def load_target(
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    decodes: bool = True,
    device_map: str | dict[str, Any] | None = None,
) -> Target:
    """Load a target for inference.

    Args:
        name: a hub id, a model folder, a ``.gguf`` file or ``builtin:smollm2``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``.
        dtype: ``auto`` (bfloat16), ``bfloat16``, ``float16``, ``float32``.
        decodes: False for a target that only runs whole sequences: it keeps the attention that transformers
            chooses, and any decoder will do.
        device_map: spreads the layers as accelerate does: ``auto``, ``balanced``, ``balanced_low_0``,
            ``sequential``, or a device for each module; ``device`` is not used then.

    Raises:
        EagleError: it cannot be found, is not a causal language model, or the device is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = choose_device(device)
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    source = resolve_target(name)
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    placed = {} if device_map is None else {"device_map": device_map}
    attention = {"attn_implementation": SLOT_ATTENTION} if decodes else {}
    path = at_hand(source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **gguf)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kind, **attention, **placed, **gguf)
        if decodes:
            _refuse_unknown_layers(name, model)
        elif getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa cannot bound scores, and does not say so
        model = model.eval().requires_grad_(False)
        if device_map is None:
            model = model.to(where)
        else:
            where = input_device(model)
    except EagleError:
        raise
    except Exception as error:  # what broken or foreign files raise has no common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if not Path(path).exists():
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
