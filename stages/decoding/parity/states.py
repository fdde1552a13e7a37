"""What a head draws on at each token of a row: as training was fed it, and as the target has it now."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.features.layout import FeatureRow
from stages.heads import DraftHead
from stages.targets import FeatureTaps, Target


def stored_states(row: FeatureRow, head: DraftHead) -> Tensor | None:
    """[n, 3h] or [n, h], by the head's kind; None where the row does not have them at every token."""
    states = row.aux if head.config.state == "aux" else row.every_last
    return states if states is not None and len(states) == len(row.input_ids) else None


@torch.inference_mode()
def live_states(target: Target, row: FeatureRow, layers: tuple[int, ...] | None) -> Tensor:
    """[n, 3h], entering each of the layers; [n, h] after the final norm where there are none."""
    ids = row.input_ids.long()[None].to(target.device)
    if layers is None:
        return target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
    ascending = tuple(sorted(set(layers)))
    with FeatureTaps(target.decoder, ascending) as taps:
        target.decoder(input_ids=ids, use_cache=False)
        found = dict(zip(ascending, taps.take()[0].chunk(len(ascending), dim=-1), strict=True))
    return torch.cat([found[layer] for layer in layers], dim=-1)
