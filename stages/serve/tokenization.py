"""`/tokenize` and `/detokenize`, as vLLM has them: what a prompt is as token ids, and ids as text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Tag

from stages.serve.chat_prompt import ChatPrompt
from stages.serve.prompt_ids import chat_ids
from stages.serve.request import TokenId
from stages.serve.request_part import RequestPart, UnicodeText
from stages.serve.served_model import ServedModel


class TokenBody(RequestPart):
    """What the bodies here have in common: the model's name."""

    model: str | None = None


class TokenizeText(TokenBody):
    """Body of `POST /tokenize` for plain text."""

    prompt: UnicodeText
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt, TokenBody):
    """The same for a chat: what `/v1/chat/completions` would read."""

    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    return "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"


TokenizeBody = Annotated[
    Annotated[TokenizeChat, Tag("<chat>")] | Annotated[TokenizeText, Tag("<text>")], Discriminator(_kind)
]


class Tokenized(BaseModel):
    """Answer of `/tokenize`. `token_strs` are the tokens as the vocabulary spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(TokenBody):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]


class Detokenized(BaseModel):
    """Answer of `/detokenize`."""

    prompt: str


def tokenized(model: ServedModel, body: TokenizeChat | TokenizeText) -> Tokenized:
    """The ids of a prompt, however many.

    Raises:
        ApiError: the messages cannot be, or the template refuses them.
    """
    if isinstance(body, TokenizeChat):
        body.refuse_prompt()
        ids = chat_ids(model, body, body.tools or [])
    else:
        ids = model.encode(body.prompt, special=body.add_special_tokens is not False)
    strings = None
    if body.return_token_strs:
        strings = [each or "" for each in model.target.tokenizer.convert_ids_to_tokens(ids)]
    return Tokenized(count=len(ids), max_model_len=model.max_length, tokens=ids, token_strs=strings)


def detokenized(model: ServedModel, body: DetokenizeBody) -> Detokenized:
    """The text of ids, special tokens as they are named.

    Raises:
        ApiError: the target lacks one of them.
    """
    model.require_ids(body.tokens, "tokens")
    text = model.target.tokenizer.decode(
        body.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return Detokenized(prompt=text)
