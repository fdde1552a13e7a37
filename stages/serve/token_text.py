"""Single tokens as bytes and as text."""

from __future__ import annotations

import codecs
import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes one


class TokenTexts:
    """What each token of a tokenizer stands for. Special tokens are written as they are named.

    Args:
        as_ids: the text of each is its id, as vLLM writes that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._named = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(tokenizer.all_special_ids)
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._letters = letters if _is_byte_level(tokenizer) else None

    def bytes_of(self, token_id: int) -> bytes:
        """Of the padding that some vocabularies end with, none."""
        if token_id in self._named:
            return self._named[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return b""
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in piece if letter in self._letters)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode()

    def text_of(self, token_id: int) -> str:
        r"""The token's text; where its bytes are a part of a character, `bytes:\xe2\x96`, as OpenAI writes
        them."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        """Whether it is left out of an answer's text."""
        return token_id in self._special


class TextOffsets:
    """Where the tokens of one answer begin in its text, in characters.

    Args:
        special: special tokens are part of the text.
    """

    def __init__(self, texts: TokenTexts, *, special: bool = False) -> None:
        self._texts = texts
        self._with_special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, token_id: int) -> int:
        """Takes the next token; returns its offset, for part of a character that of the whole."""
        offset = self._characters
        if self._with_special or not self._texts.is_special(token_id):
            self._characters += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offset


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether letters stand for bytes in its vocabulary, as in GPT-2's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")
    return "ByteLevel" in repr(backend.decoder)
