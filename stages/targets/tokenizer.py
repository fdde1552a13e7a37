"""A target's tokenizer without the target: its identity, and loading it where only text is wanted.

Nothing heavy is imported before a tokenizer needs it: one with a `tokenizer.json` needs no transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.errors import EagleError
from stages.targets.hub import at_hand
from stages.targets.resolve import resolve_tokenizer

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 hex of a tokenizer of transformers or of the tokenizers library.

    Truncation and padding are left out: every call may set them anew.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None) or (
        tokenizer if hasattr(tokenizer, "to_str") else None
    )
    if backend is None:
        text = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        plain = type(backend).from_str(backend.to_str())
        plain.no_truncation()
        plain.no_padding()
        text = plain.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def load_tokenizer(target: str, digest: str | None = None) -> Any:
    """Something with `decode(ids, skip_special_tokens=...)`, of a target as the user names it or of a folder.

    Args:
        digest: of the tokenizer that is wanted, as fingerprints have it. transformers changes some that it
            reads, so where the file by itself is another one, transformers reads it.

    Raises:
        EagleError: it cannot be found or read.
    """
    source = resolve_tokenizer(target)
    file = Path(source.path) / TOKENIZER_FILE
    if not source.gguf_file and file.is_file():
        tokenizer = read_tokenizer(file, target)
        if digest is None or tokenizer_digest(tokenizer) == digest:
            return tokenizer
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    path = at_hand(source.path)
    with _readable(target):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, **gguf)


def read_tokenizer(file: Path, name: str) -> Any:
    """The same of a `tokenizer.json`; `name` is whose it is, for the error.

    Raises:
        EagleError: it cannot be read.
    """
    with _readable(name):
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what broken files and an unreachable hub raise has no common base
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise EagleError(f"cannot load the tokenizer of {name}: {reason}") from error
