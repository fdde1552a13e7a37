"""min_tokens, allowed_token_ids and bad_words: what they rule out is never drawn, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.serve.token_rules import TokenRules
from stages.targets import Target
from tests.serve.running_server import RunningServer

V = 12
Ids = st.lists(st.integers(0, V - 1), max_size=8)


@given(Ids, st.sets(st.integers(0, V - 1)), st.none() | st.sets(st.integers(0, V - 1), min_size=1), st.data())
def test_what_may_follow_is_what_no_rule_forbids(
    output: list[int], ends: set[int], allowed: set[int] | None, data: st.DataObject
) -> None:
    words = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3))
    least = data.draw(st.integers(0, 8))
    rules = TokenRules(V, ends, allowed=allowed, words=words, min_tokens=least)
    fits = {
        token
        for token in (range(V) if allowed is None else allowed)
        if not (token in ends and len(output) < least)
        and not any([*output, token][-len(word) :] == word for word in words)
    }
    found = set(rules(output).nonzero()[:, 0].tolist())
    assert found == (fits or ends or allowed or set(range(V)))


def both(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A completion's choice, which is the same with drafts and without."""
    fields = {"prompt": "hello", "return_token_ids": True, "max_tokens": 60, **fields}
    drafted, plain = (server.complete(speculative=each, **fields).json() for each in (True, False))
    assert drafted["usage"]["speculation"]["drafted"] > 0 or drafted["usage"]["completion_tokens"] == 1
    assert plain["choices"] == drafted["choices"]
    return drafted["choices"][0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_has_at_least_its_tokens_and_no_stop_string_ends_it_sooner(
    server: RunningServer, target: Target, temperature: float
) -> None:
    eos = target.tokenizer.eos_token_id
    fields: dict[str, Any] = {"temperature": temperature, "seed": 1, "logit_bias": {str(eos): 100}}
    assert both(server, **fields)["token_ids"] == [eos]
    long = both(server, min_tokens=20, **fields)
    assert len(long["token_ids"]) == 21
    assert long["token_ids"][-1] == eos
    free = both(server, temperature=temperature, seed=1, ignore_eos=True)
    stop = free["text"][2:4]
    early = both(server, temperature=temperature, seed=1, ignore_eos=True, stop=stop)
    late = both(server, temperature=temperature, seed=1, ignore_eos=True, stop=stop, min_tokens=30)
    assert len(early["token_ids"]) < 30 <= len(late["token_ids"])
    assert free["text"].startswith(late["text"])


def test_only_allowed_tokens_are_drawn(server: RunningServer, target: Target) -> None:
    allowed = [*range(40, 60), target.tokenizer.eos_token_id]
    for seed in range(3):
        choice = both(server, temperature=1.0, seed=seed, allowed_token_ids=allowed)
        assert set(choice["token_ids"]) <= set(allowed)
        assert len(set(choice["token_ids"])) > 3


def test_bad_words_are_not_written(server: RunningServer) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    text = both(server, **fields)["text"]
    words = [text[i : i + 2] for i in (4, 9, 20) if text[i : i + 2].isascii()]
    assert words
    choice = both(server, bad_words=words, **fields)
    assert choice["text"] != text
    ids = choice["token_ids"]
    for word in words:
        spelled = server.client.post(f"{server.url}/tokenize", json={"prompt": word}).json()["tokens"]
        assert all(ids[i : i + len(spelled)] != spelled for i in range(len(ids)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "word"}, "bad_words"),
        *(
            ({name: value, "response_format": {"type": "json_object"}}, name)
            for name, value in (("min_tokens", 3), ("allowed_token_ids", [3]), ("bad_words", ["x"]))
        ),
    ],
)
def test_what_cannot_be_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
