"""Log-probabilities in answers: in OpenAI's form, of the target's own distribution."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from stages.decoding import EagleModel
from stages.serve.token_text import TextOffsets, TokenTexts
from tests.serve.running_server import RunningServer

ASKED = {"max_tokens": 14, "seed": 4, "return_token_ids": True, "temperature": 0.7, "top_p": 0.9}


@pytest.fixture(scope="module")
def texts(plain: EagleModel) -> TokenTexts:
    return TokenTexts(plain.target.tokenizer)


def expected(plain: EagleModel, prompt_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, V] by one forward of the model."""
    with torch.no_grad():
        logits = plain.target.model(torch.tensor([prompt_ids + answer_ids])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].float().log_softmax(-1)


def test_a_chat_tells_of_each_token_the_targets_own_distribution(
    server: RunningServer, plain: EagleModel, texts: TokenTexts
) -> None:
    body = server.chat(logprobs=True, top_logprobs=3, **ASKED).json()
    choice = body["choices"][0]
    ids, told = choice["token_ids"], choice["logprobs"]["content"]
    scores = expected(plain, body["prompt_token_ids"], ids)
    assert len(told) == len(ids) == body["usage"]["completion_tokens"]
    assert body["usage"]["speculation"]["drafted"] > 0
    for token, row, entry in zip(ids, scores, told, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert bytes(entry["bytes"]) == texts.bytes_of(token)
        assert entry["token"] == texts.text_of(token)
        best = row.topk(3)
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        assert [each["token"] for each in entry["top_logprobs"]] == [
            texts.text_of(i) for i in best.indices.tolist()
        ]


def test_a_completion_tells_them_in_columns(
    server: RunningServer, plain: EagleModel, texts: TokenTexts
) -> None:
    body = server.complete([5, 6, 7], logprobs=2, **ASKED).json()
    choice = body["choices"][0]
    ids, told = choice["token_ids"], choice["logprobs"]
    scores = expected(plain, [5, 6, 7], ids)
    own = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert told["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
    assert told["tokens"] == [texts.text_of(token) for token in ids]
    for token, row, top in zip(ids, scores, told["top_logprobs"], strict=True):
        assert set(top) == {texts.text_of(i) for i in [*row.topk(2).indices.tolist(), token]}
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_tells_the_same_with_and_without_drafts(server: RunningServer, kind: str) -> None:
    ask = server.chat if kind == "chat" else server.complete
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    whole = ask(**wanted, **ASKED).json()["choices"][0]
    plain = ask(**wanted, **ASKED, speculative=False).json()["choices"][0]
    assert plain["logprobs"] == whole["logprobs"]
    told: list[Any] = []
    for line in ask(**wanted, **ASKED, stream=True).text.splitlines():
        if line.startswith("data: {"):
            part = json.loads(line[6:])["choices"][0]
            found = part["logprobs"] or {}
            assert len(part["token_ids"]) == len(next(iter(found.values()), []))
            told.append(found)
    assert len(told) > 2
    joined = {key: [*chain(*(part.get(key) or [] for part in told))] for key in whole["logprobs"]}
    assert joined == {key: value or [] for key, value in whole["logprobs"].items()}


def test_nothing_is_told_unless_it_is_asked_for(server: RunningServer) -> None:
    for choice in (
        server.chat(max_tokens=2).json()["choices"][0],
        server.chat(max_tokens=2, logprobs=False, top_logprobs=0).json()["choices"][0],
        server.complete(max_tokens=2).json()["choices"][0],
    ):
        assert choice["logprobs"] is None
    entry = server.chat(max_tokens=2, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"] == []


def test_tokens_are_named_by_their_ids_if_that_is_wanted(server: RunningServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "seed": 1, "return_token_ids": True}
    fields["return_tokens_as_token_ids"] = True
    (choice,) = server.complete(logprobs=2, **fields).json()["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    (choice,) = server.chat(logprobs=True, top_logprobs=2, **fields).json()["choices"]
    told = choice["logprobs"]["content"]
    assert [entry["token"] for entry in told] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in told for top in entry["top_logprobs"])


def test_what_cannot_be_told_is_refused(server: RunningServer) -> None:
    error = server.chat(top_logprobs=3).json()["error"]
    assert (error["param"], error["code"]) == ("top_logprobs", "invalid_value")
    for reply in (server.chat(logprobs=True, top_logprobs=21), server.complete(logprobs=21)):
        assert reply.status_code == 400
    assert server.chat(return_tokens_as_token_ids=True).status_code == 400
    assert server.complete(logprobs=1, echo=True).json()["error"]["param"] == "echo"


def test_the_openai_client_reads_them(server: RunningServer) -> None:
    client = server.openai()
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert len(entries) == chat.usage.completion_tokens  # type: ignore[union-attr]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    text = client.completions.create(model="tiny", prompt="hi", max_tokens=4, logprobs=1)
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == text.usage.completion_tokens  # type: ignore[union-attr]


def test_the_bytes_of_tokens_joined_are_the_texts(texts: TokenTexts, plain: EagleModel) -> None:
    tokenizer, text = plain.target.tokenizer, "Größe 模型 🦅 e\u0301 end"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(map(texts.bytes_of, ids)).decode() == text
    assert any(texts.text_of(token).startswith("bytes:\\x") for token in ids)
    assert texts.text_of(tokenizer.eos_token_id) == "<|im_end|>"
    offsets = TextOffsets(texts)
    at = [offsets.push(token) for token in ids]
    for token, offset in zip(ids, at, strict=True):
        if not texts.text_of(token).startswith("bytes:"):
            assert text[offset:].startswith(texts.text_of(token))


def test_the_bytes_of_a_sentencepiece_vocabulary_are_found_too() -> None:
    pieces = ["<unk>", "<s>", "<0xC3>", "<0xB6>", "\u2581the", "\u2581", "\u00e9"]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>"))
    found = [texts.bytes_of(i) for i in range(len(pieces) + 1)]
    assert found == [b"<unk>", b"<s>", b"\xc3", b"\xb6", b" the", b" ", b"\xc3\xa9", b""]
    assert [texts.text_of(i) for i in (2, 4)] == ["bytes:\\xc3", " the"]
