"""Training-time test: the head drafts a chain from every query at once, on true tokens and its own states.

Step i of the query at index j takes the token x_{j+1+i}, its own output of step i-1 as the feature (step 0:
the fused target features), RoPE position j+i, and predicts x_{j+2+i}. Gradients flow through all steps (arXiv
2503.01840, 3.2). Equal to drafting a chain of i+1 tokens from the prefix that ends at j, if the tokens
drafted are the true ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.heads import Eagle3Head
from stages.train.attention import ttt_attention
from stages.train.batch import TttBatch


def ttt_hidden(head: Eagle3Head, batch: TttBatch, steps: int) -> list[Tensor]:
    """The head's pre-norm states of each draft step, [Q, h] each.

    All key tokens pass through `fuse` and the key and value projections; everything else is computed for
    queries only, as nothing else looks at the other tokens' states.
    """
    dtype = batch.aux.dtype
    features = head.fuse(batch.aux)  # [N, h]
    inputs = head.attention_input(head.embed(batch.tokens).to(dtype), features)  # [N, 2h]
    keys, values = head.keys_values(inputs, batch.positions)  # [N, Hkv, D]
    feature, x, positions = features[batch.queries], inputs[batch.queries], batch.positions[batch.queries]
    own_keys = [keys.new_empty(len(x), 0, *keys.shape[1:])]
    own_values = [values.new_empty(len(x), 0, *values.shape[1:])]
    hidden: list[Tensor] = []
    for step in range(steps):
        if step > 0:
            feature = hidden[-1]
            x = head.attention_input(head.embed(batch.step_tokens[step]).to(dtype), feature)
            own_key, own_value = head.keys_values(x, positions + step)
            own_keys.append(own_key[:, None])
            own_values.append(own_value[:, None])
        q = head.queries(x, positions + step)
        attended = ttt_attention(
            q, keys, values, torch.cat(own_keys, dim=1), torch.cat(own_values, dim=1), batch.groups
        )
        hidden.append(head.output(feature, attended))
    return hidden
