"""Torch pickles from elsewhere: plain tensors in plain containers, or nothing."""

from __future__ import annotations

import gzip
import io
import pickle
import re
from typing import Any

import torch

from stages.errors import EagleError

_NAMED = re.compile(r"GLOBAL ([\w.]+)")


class DamagedError(Exception):
    """A file that cannot be read: truncated, or of another kind than its name says."""


def load_pickle(data: bytes, where: str) -> Any:
    """What `torch.save` wrote, through torch's loader that runs no code; `.gz` is unpacked first.

    Raises:
        EagleError: it holds more than tensors, numbers, strings, lists and dictionaries.
        DamagedError: it is truncated or no file of torch.
    """
    try:
        if where.endswith(".gz"):
            data = gzip.decompress(data)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = _NAMED.search(str(error))
        what = f"holds more than tensors ({named[1]})" if named else "is no torch file of tensors alone"
        raise EagleError(
            f"{where} {what}, and reading it all the same could run any code: eagle does not; save its "
            "tensors alone"
        ) from None
    except Exception as error:  # what damaged files make torch raise has no common base
        raise DamagedError(" ".join(str(error).split())[:120] or type(error).__name__) from None
