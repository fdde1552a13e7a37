"""The claim that the states stored are those that transformers shows for each row on its own, unpadded."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from stages.errors import EagleError
from stages.features import states
from stages.features.layout import supervised_positions
from stages.features.states import TokenBatch, target_states
from stages.targets import FeatureTaps, Target

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3 with heads wider than h / heads": Qwen3Config(**SIZES, head_dim=16),
    "mistral with a sliding window": MistralConfig(**SIZES, sliding_window=6),
    "gemma2 with a sliding window and capped logits": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=6, final_logit_softcapping=5.0
    ),
    "phi with layer norms and biases": PhiConfig(**(SIZES | {"num_key_value_heads": 4})),
}


def make_target(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    return Target(name="tiny", model=model, tokenizer=None, device=torch.device("cpu"), dtype=dtype)


def make_batch(*masks: str) -> TokenBatch:
    loss_mask = torch.tensor([int(c) for c in "".join(masks)], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    return TokenBatch(
        row_ids=tuple(range(len(masks))),
        input_ids=torch.randint(1, 97, (len(loss_mask),), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        row_offsets=torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0),
    )


MASKS = ("0001111111111111", "001100011", "011111", "0000111", "0011")


@pytest.mark.parametrize("name", CONFIGS)
def test_states_are_those_of_transformers_on_each_row_alone(name: str) -> None:
    target, batch = make_target(CONFIGS[name]), make_batch(*MASKS)
    with FeatureTaps(target.decoder, target.feature_layers) as taps:
        found = target_states(target, taps, batch)
    aux, last, argmax = [], [], []
    for row, row_mask in zip(batch.input_ids.split([len(m) for m in MASKS]), MASKS, strict=True):
        with torch.no_grad():
            shown = target.model(row.long()[None], output_hidden_states=True)
        positions = [p for p in range(1, len(row_mask) - 1) if row_mask[p : p + 2] == "11"]
        aux.append(torch.cat([shown.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1))
        last.append(shown.hidden_states[-1][0, positions])
        argmax.append(shown.logits[0, positions].argmax(-1))
    torch.testing.assert_close(found.aux, torch.cat(aux), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.last, torch.cat(last), rtol=1e-5, atol=1e-5)
    assert found.target_argmax.tolist() == torch.cat(argmax).tolist()
    assert found.target_argmax.unique().numel() > 1


def test_states_are_in_the_dtype_of_the_target() -> None:
    target, batch = make_target(CONFIGS["llama"], torch.bfloat16), make_batch(*MASKS)
    with FeatureTaps(target.decoder, target.feature_layers) as taps:
        found = target_states(target, taps, batch)
    assert (found.aux.dtype, found.last.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (found.aux.shape, found.target_argmax.dtype) == ((len(batch.input_ids), 96), torch.int32)


def test_logits_are_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = make_target(CONFIGS["llama"]), make_batch(*MASKS)
    largest = []
    target.model.lm_head.register_forward_hook(lambda module, args, logits: largest.append(logits.numel()))
    with FeatureTaps(target.decoder, target.feature_layers) as taps:
        at_once = target_states(target, taps, batch).target_argmax
        monkeypatch.setattr(states, "LOGITS_BYTES", 3 * 97 * 4)
        in_parts = target_states(target, taps, batch).target_argmax
    count = len(supervised_positions(batch.loss_mask, batch.row_offsets))
    assert largest == [97 * count] + [97 * 3] * (count // 3) + [97 * (count % 3)] * (count % 3 > 0)
    assert torch.equal(at_once, in_parts)


def test_a_target_of_six_layers_is_refused_with_its_count() -> None:
    target = make_target(LlamaConfig(**(SIZES | {"num_hidden_layers": 6})))
    with pytest.raises(EagleError, match="6 layers"):
        _ = target.feature_layers
