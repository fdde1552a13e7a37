"""The attention function that a target's layers call: slot KV cache and draft tree, or plain sdpa.

Registered with transformers under ``SLOT_ATTENTION``, so that any decoder that goes through its attention
interface can verify trees without a change to its code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels import tree_attention, tree_mask
from kernels.cpu import DTYPES, load_ops
from kernels.dispatch import use_triton
from stages.errors import EagleError
from stages.targets.slots import RowStep, SlotStep

SLOT_ATTENTION = "eagle_slots"


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slots: SlotStep | RowStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values in their slots and attend over prefix and tree.

    Args:
        query: [B, Hq, N, D]; key and value: [B, Hkv, N, D], positions already applied.
        slots: where this forward's tokens go; None outside of decoding, which is transformers' own sdpa then.

    Returns:
        [B, N, Hq, D] and None, as transformers expects.
    """
    if slots is None:
        if kwargs.get("softcap") is not None:
            return _capped_attention(query, key, value, attention_mask, scaling, kwargs["softcap"])
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("s_aux") is not None:
        raise EagleError("this target's attention uses sinks, which decoding does not support yet")
    if isinstance(slots, RowStep):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
        return attend_rows(
            slots, module.layer_idx, query, key, value, scale=scale, window=window, softcap=softcap
        ), None
    out = attend(
        slots,
        module.layer_idx,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    return out.transpose(1, 2).contiguous(), None


def attend_rows(
    step: RowStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """``attend`` over rows, by the CPU op: query [1, Hq, M, D], key and value [1, Hkv, M, D] to [1, M, Hq,
    D]."""
    return torch.ops.eagle_cpu.attend(
        query, key, value, step.places, step.where, layer, scale, window or 0, softcap or 0.0
    )


def attend(
    step: SlotStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write new keys and values [B, Hkv, N, D] into the step's slots, and attend from query [B, Hq, N, D]:
    same shape."""
    if query.device.type == "cpu" and query.dtype in DTYPES and load_ops() is None:
        rows = RowStep(step.places, step.cache.where)
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
        out = attend_rows(rows, layer, q, k, v, scale=scale, window=window, softcap=softcap)
        return out.view(step.batch, step.nodes, *out.shape[2:]).transpose(1, 2)
    keys, values = step.write(layer, key, value)
    if step.ancestors is None:
        return _prefill_attention(query, keys, values, step, scale, window, softcap)
    mask = None  # the kernel builds none
    if not use_triton(query):
        mask = step.mask
        if window is not None and mask.shape[-1] > window:
            mask = tree_mask(step.lengths, step.ancestors, mask.shape[-1], window)
    return tree_attention(
        query,
        keys,
        values,
        step.slots,
        step.lengths,
        step.ancestors,
        scale,
        sliding_window=window,
        softcap=softcap,
        tree_rows=step.offset + query.shape[2],
        mask=mask,
    )


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> tuple[Tensor, None]:
    """Attention with bounded scores outside of decoding, which sdpa cannot do; None is the causal mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * ((query @ key.transpose(-1, -2)).float() * (scale / softcap)).tanh()
    if mask is None:
        new, size = scores.shape[-2:]
        mask = torch.ones(new, size, dtype=torch.bool, device=query.device).tril(size - new)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def _prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: SlotStep,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of a long run of new tokens: [B, Hq, N, D]."""
    mask = slots.mask  # [B, 1, N, size]
    size = mask.shape[-1]
    if window is not None and size > window:
        own = slots.lengths[:, None] + mask.new_ones(query.shape[2]).cumsum(0) - 1  # [B, N] row = position
        rows = mask.new_ones(size).cumsum(0) - 1
        mask = mask & (own[:, :, None] - rows < window).unsqueeze(1)
    keys, values = keys[slots.slots, :, :size], values[slots.slots, :, :size]
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = softcap * ((query @ keys.transpose(-1, -2)).float() * (scale / softcap)).tanh()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(values.dtype) @ values


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
