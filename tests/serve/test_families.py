"""A request of each model family through the server: the text of the engine itself, drafted or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.decoding import EagleModel, SamplingParams
from stages.decoding.tree import TreeConfig
from stages.heads import Eagle3Config, Eagle3Head
from stages.targets import Target, load_target
from tests.decoding.test_families import FAMILIES, SIZES, build
from tests.serve.conftest import WIDE_TREE
from tests.serve.running_server import running_server
from tests.tiny import make_tiny_tokenizer

TOKENS = 24


def load(family: str, folder: Path) -> Target:
    """The family's tiny random model, from files as a user has them."""
    build(FAMILIES[family], "eager").save_pretrained(folder)
    make_tiny_tokenizer(SIZES["vocab_size"], SIZES["max_position_embeddings"]).save_pretrained(folder)
    return load_target(str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_family_is_the_engines_own_with_drafts_and_without(family: str, tmp_path: Path) -> None:
    target = load(family, tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle3Head(Eagle3Config.from_target(target.config, SIZES["vocab_size"]))
    plain = EagleModel(target)
    prompt = target.render([{"role": "user", "content": "hello"}])
    accepted = 0
    with running_server(EagleModel(target, head, TreeConfig.parse(WIDE_TREE), max_batch=2)) as server:
        for temperature in (0.0, 0.9):
            params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=3, ignore_eos=True)
            expected = plain.generate(prompt, params).text
            for drafts in (True, False):
                fields = {"temperature": temperature, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True}
                body = server.chat(speculative=drafts, **fields).json()
                assert body["choices"][0]["message"]["content"] == expected
                found = body["usage"]["speculation"]
                assert (found["drafted"] > 0) == drafts
                accepted += found["accepted"]
    assert accepted > 0, "else the drafts were not put to the test"
