"""`--kv-memory`: the slots are made as long as fits, and stay so."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.decoding import EagleModel, Engine, GenerationRequest, SamplingParams
from stages.errors import EagleError
from stages.progress import Reporter
from stages.serve.config import ServeConfig
from stages.serve.kv_memory import LEAST, reserve_kv
from stages.serve.stage import run
from stages.targets import Target
from tests.serve.conftest import WIDE_TREE

TOKEN = 2 * 8 * 2 * 16 * 4
"""Bytes of one token in one slot of the tiny target: keys and values, layers, heads, their size, float32."""


@pytest.fixture
def engine(target: Target, head_folder: str) -> Engine:
    """Of three slots."""
    return EagleModel.from_pretrained(target, head_folder, tree=WIDE_TREE, max_batch=3).engine


def held(engine: Engine) -> int:
    caches = [engine.cache, engine.drafter.cache if engine.drafter is not None else None]
    return sum(cache.data.nbytes for cache in caches if cache is not None)


def test_the_bytes_of_a_token_are_those_of_target_and_head(engine: Engine) -> None:
    assert engine.cache.row_bytes == 3 * TOKEN < engine.token_bytes
    assert held(engine) == engine.token_bytes * engine.cache.rows


def test_answers_as_long_as_they_may_be_take_no_more_memory_than_was_given(engine: Engine) -> None:
    memory = engine.needed_bytes(400)
    length = reserve_kv(engine, memory, 512, cut=True)
    assert 400 <= length < 512
    places = engine.cache.data.data_ptr(), held(engine)
    params = SamplingParams(max_new_tokens=length - 20, ignore_eos=True)
    for i in range(5):
        engine.submit(GenerationRequest(str(i), [i + 1] * 20, params))
    while engine.busy:
        engine.step()
    assert (engine.cache.data.data_ptr(), held(engine)) == places
    assert held(engine) <= memory


@pytest.mark.parametrize("wanted", [300, 512])
def test_what_is_asked_for_fits_into_the_bytes_that_are_named(engine: Engine, wanted: int) -> None:
    with pytest.raises(
        EagleError, match=rf"and {wanted} are needed; lower --max-batch or --max-model-len"
    ) as error:
        reserve_kv(engine, engine.needed_bytes(wanted) - 1, wanted, cut=False)
    assert "\n" not in str(error.value)
    assert reserve_kv(engine, engine.needed_bytes(wanted), wanted, cut=False) == wanted


def test_less_than_a_useful_context_is_refused(engine: Engine) -> None:
    with pytest.raises(
        EagleError, match=rf"room for 64 tokens in each of 3 slots, and {LEAST} are needed; lower"
    ):
        reserve_kv(engine, 128 * engine.token_bytes, 512, cut=True)


def test_the_server_says_what_to_lower(tiny_folder: Path) -> None:
    config = ServeConfig(
        target=str(tiny_folder), device="cpu", dtype="float32", port=0, kv_memory="1MiB", max_model_len=500
    )
    with pytest.raises(
        EagleError, match=r"--kv-memory 1MiB has room for 0 tokens in each of 8 slots, and 500"
    ):
        run(config, Reporter(quiet=True))
