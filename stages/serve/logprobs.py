"""Log-probabilities in OpenAI's two forms: of chats, and of the older text completions."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from stages.decoding import TokenLogprobs
from stages.serve.token_text import TextOffsets, TokenTexts

LEAST = -9999.0
"""JSON has no infinity; OpenAI and vLLM write this."""


class TokenLogprob(BaseModel):
    """A token with its natural log-probability; see `TokenTexts` for those that are no text."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the most probable ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of each token of a chat's answer, the one that ended it included."""

    content: list[ChosenLogprob]
    refusal: None = None


class TextLogprobs(BaseModel):
    """The same in columns; `top_logprobs` have the answer's own token too."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """Of these tokens of an answer."""
    content = [
        ChosenLogprob(
            token=texts.text_of(token_id),
            logprob=max(entry.logprob, LEAST),
            bytes=list(texts.bytes_of(token_id)),
            top_logprobs=[
                TokenLogprob(
                    token=texts.text_of(other), logprob=max(score, LEAST), bytes=list(texts.bytes_of(other))
                )
                for other, score in entry.top
            ],
        )
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return ChatLogprobs(content=content)


def text_logprobs(
    texts: TokenTexts, offsets: TextOffsets, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> TextLogprobs:
    """Of the next tokens of an answer, whose earlier ones `offsets` has taken."""
    return TextLogprobs(
        tokens=[texts.text_of(token_id) for token_id in token_ids],
        token_logprobs=[max(entry.logprob, LEAST) for entry in entries],
        top_logprobs=[
            {texts.text_of(other): max(score, LEAST) for other, score in entry.top}
            | {texts.text_of(token_id): max(entry.logprob, LEAST)}
            for token_id, entry in zip(token_ids, entries, strict=True)
        ],
        text_offset=[offsets.push(token_id) for token_id in token_ids],
    )
