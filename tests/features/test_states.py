"""The claim that the states stored are those that transformers shows for each row on its own, unpadded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from stages.errors import EagleError
from stages.features import states
from stages.features.layout import supervised_positions
from stages.features.probe import probe
from stages.features.states import States, TokenBatch, first_of_largest, target_states
from stages.features.storage import FP8, StorageFormat, unpack
from stages.targets import FeatureTaps, Target
from tests.features.families import FAMILIES, SIZES, VOCAB, make_batch, make_target

MASKS = ("0001111111111111", "001100011", "011111", "0000111", "0011")
LAYERS = (2, 4, 5)


def extract(target: Target, batch: TokenBatch, storage: StorageFormat | None = None) -> States:
    with FeatureTaps(target.decoder, LAYERS) as taps:
        found = target_states(target, taps, batch, storage)
    found.wait()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_on_each_row_alone(family: str) -> None:
    target, batch = make_target(FAMILIES[family]), make_batch(*MASKS)
    with FeatureTaps(target.decoder, LAYERS) as taps:
        probe(target, taps, LAYERS, batch.input_ids[: len(MASKS[0])].long())
    together = extract(target, batch)
    alone = [extract(target, make_row(batch, number)) for number in range(len(MASKS))]
    if target.model.config._attn_implementation == "sdpa" and "bloom" not in family:
        target.model.set_attn_implementation("eager")  # another way to the same states
    aux, last, argmax = [], [], []
    for row, row_mask in zip(batch.input_ids.split([len(m) for m in MASKS]), MASKS, strict=True):
        with torch.no_grad():
            shown = target.model(row.long()[None], output_hidden_states=True, use_cache=False)
        positions = [p for p in range(1, len(row_mask) - 1) if row_mask[p : p + 2] == "11"]
        aux.append(torch.cat([shown.hidden_states[layer][0] for layer in LAYERS], dim=-1))
        last.append(shown.hidden_states[-1][0, positions])
        argmax.append(shown.logits[0, positions].argmax(-1))
    # Recurrent layers add up in chunks of the batch's length, so their sums round differently.
    near = 1e-4 if family.endswith(("linear attention", "state space")) else 1e-5
    for found in (together, joined(alone)):
        torch.testing.assert_close(found.aux, torch.cat(aux), rtol=near, atol=near)
        torch.testing.assert_close(found.last, torch.cat(last), rtol=near, atol=near)
        assert found.target_argmax.tolist() == torch.cat(argmax).tolist()
    assert together.target_argmax.unique().numel() > 1


def make_row(batch: TokenBatch, number: int) -> TokenBatch:
    tokens = slice(int(batch.row_offsets[number]), int(batch.row_offsets[number + 1]))
    return TokenBatch(
        (number,),
        batch.input_ids[tokens],
        batch.loss_mask[tokens],
        torch.tensor([0, tokens.stop - tokens.start]),
    )


def joined(parts: list[States]) -> States:
    return States(
        torch.cat([part.aux for part in parts]),
        torch.cat([part.last for part in parts]),
        torch.cat([part.target_argmax for part in parts]),
        None,
        None,
        torch.tensor(True),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_in_the_dtype_of_the_target(dtype: torch.dtype) -> None:
    batch = make_batch(*MASKS)
    found = extract(make_target(FAMILIES["llama"], dtype), batch)
    assert (found.aux.dtype, found.last.dtype) == (dtype, dtype)
    assert (found.aux.shape, found.target_argmax.dtype) == ((len(batch.input_ids), 96), torch.int32)


def test_the_most_likely_token_is_that_of_the_states_before_they_are_rounded() -> None:
    target, batch = make_target(FAMILIES["llama"]), make_batch(*["0" + "1" * 40] * 12)
    exact, rounded = extract(target, batch), extract(target, batch, StorageFormat(FP8))
    assert torch.equal(exact.target_argmax, rounded.target_argmax)
    of_rounded = target.logits(unpack(rounded.last, rounded.last_scale).float()).argmax(-1)
    assert not torch.equal(of_rounded.int(), exact.target_argmax), "there is something to round wrongly"


def test_states_that_are_no_numbers_are_refused() -> None:
    target = make_target(FAMILIES["llama"], torch.float16)
    target.model.model.embed_tokens.weight.data[5] = 60000.0
    target.model.model.layers[0].self_attn.v_proj.weight.data.fill_(60000.0)
    batch = make_batch("0111")
    batch.input_ids.fill_(5)
    with pytest.raises(EagleError, match="infinite or no numbers, stored as float16: use --dtype bfloat16"):
        extract(target, batch)


def test_logits_are_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = make_target(FAMILIES["llama"]), make_batch(*MASKS)
    largest = []
    target.model.lm_head.register_forward_hook(lambda module, args, logits: largest.append(logits.numel()))
    at_once = extract(target, batch).target_argmax
    monkeypatch.setattr(states, "LOGITS_BYTES", 3 * VOCAB * 4)
    in_parts = extract(target, batch).target_argmax
    count = len(supervised_positions(batch.loss_mask, batch.row_offsets))
    assert largest == [VOCAB * count] + [VOCAB * 3] * (count // 3) + [VOCAB * (count % 3)] * (count % 3 > 0)
    assert torch.equal(at_once, in_parts)


@given(st.integers(500, 1500), st.integers(0, 10_000), st.sampled_from([torch.bfloat16, torch.float32]))
def test_the_first_of_the_largest_logits_is_found(vocab: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (6, vocab), generator=generator).to(dtype)  # full of equals
    assert torch.equal(first_of_largest(logits), logits.argmax(-1))
    place = torch.randint(0, vocab, (6,), generator=generator)
    logits[torch.arange(6), place] = 5
    assert torch.equal(first_of_largest(logits), place)


def test_a_target_of_six_layers_is_refused_with_its_count() -> None:
    target = make_target(LlamaConfig(**(SIZES | {"num_hidden_layers": 6})))
    with pytest.raises(EagleError, match="6 layers needs at least 7, or three layers of your choice"):
        _ = target.feature_layers


def probed(target: Target) -> str:
    with FeatureTaps(target.decoder, LAYERS) as taps, pytest.raises(EagleError) as error:
        probe(target, taps, LAYERS, make_batch("0" * 12).input_ids.long())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_target_whose_tokens_see_what_is_behind_them_is_refused() -> None:
    target = make_target(FAMILIES["llama"])
    for layer in target.model.model.layers:
        layer.self_attn.is_causal = False
    assert "a LlamaForCausalLM: a token's state depends on the tokens behind it" in probed(target)


def test_a_target_whose_logits_are_made_in_an_unknown_way_is_refused() -> None:
    target = make_target(FAMILIES["llama"])
    target.model.register_forward_hook(
        lambda module, args, output: setattr(output, "logits", output.logits * 2)
    )
    assert "its logits are not made of its last state" in probed(target)


def test_a_target_whose_layers_are_entered_by_other_states_is_refused() -> None:
    target = make_target(FAMILIES["llama"])

    def shift(module, args, output):
        output.hidden_states = tuple(state + 1 for state in output.hidden_states)

    target.model.register_forward_hook(shift)
    assert "its layers are not entered by the states that transformers shows" in probed(target)
