"""How long the sequences of a server may be for their keys and values to fit into its memory."""

from __future__ import annotations

from stages.config import format_bytes
from stages.decoding import Engine
from stages.errors import EagleError

LEAST = 256
"""Tokens below which a server is of little use."""


def reserve_kv(engine: Engine, memory: int, wanted: int, *, cut: bool) -> int:
    """Make every slot of the engine as long as it may become, and no longer.

    Args:
        memory: bytes that all keys and values may take, the drafter's included.
        wanted: tokens of a prompt and its answer together.
        cut: whether fewer will do, if these do not fit.

    Returns:
        The tokens that fit, at most those wanted.

    Raises:
        EagleError: too few fit.
    """
    fitting, least = engine.fitting_tokens(memory), min(wanted, LEAST) if cut else wanted
    if fitting < least:
        lower = "--max-batch" if cut else "--max-batch or --max-model-len"
        raise EagleError(
            f"--kv-memory {format_bytes(memory)} has room for {fitting} tokens in each of "
            f"{engine.cache.slots} slots, and {least} are needed; lower {lower}, or give at least "
            f"{format_bytes(engine.needed_bytes(least))}"
        )
    length = min(fitting, wanted)
    engine.reserve(length)
    return length
