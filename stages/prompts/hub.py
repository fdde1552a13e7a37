"""Rows of Hugging Face data sets, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stages.errors import EagleError
from stages.prompts.row import Row
from stages.prompts.text import one_line

_HUB_ID = re.compile(
    r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.,+-]*))?(:(?P<split>[\w.+%\[\]:-]+))?", re.ASCII
)
_HUB_URI = "hf://datasets/"
_TIMEOUT_S = 10.0


def hub_id(src: str) -> tuple[str, str | None, str | None] | None:
    """Id, configuration and split of `id[:config[:split]]`, config may be empty; None for another form."""
    match = _HUB_ID.fullmatch(src.removeprefix(_HUB_URI).rstrip("/"))
    return (match["id"], match["config"] or None, match["split"]) if match else None


def hub_rows(src: str, name: str, config: str | None = None, split: str | None = None) -> Iterator[Row]:
    """The rows of one split of a data set, by default of `train`, or of the first one.

    Args:
        src: what the user typed; messages name it.
        name: a hub id, or a local folder.

    Raises:
        EagleError: the hub does not give it, or it has no such configuration or split.
    """
    import datasets

    try:
        if not Path(name).is_dir():
            _look_up(name)
        splits = datasets.load_dataset(name, config, streaming=True)
        chosen = split or ("train" if "train" in splits else next(iter(splits)))
        if chosen not in splits:
            raise EagleError(f"prompts {src}: no split {chosen}, it has {', '.join(map(str, splits))}")
        rows = splits[chosen].decode(False)  # of pictures and sounds, which no one looks at
        for number, row in enumerate(rows, start=1):
            yield Row(f"{name.rsplit('/', 1)[-1]}:{number}", f"{src} [{chosen}], row {number}", row)
    except EagleError:
        raise
    except Exception as error:  # the client, its transports and each format raise their own
        raise EagleError(
            f"prompts {src}: no such file, and not to be had as a Hugging Face data set either "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None


def _look_up(name: str) -> None:
    """Raises what is wrong with an id at once; opening the data set would try again for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not HF_HUB_OFFLINE:
        HfApi().dataset_info(name, timeout=_TIMEOUT_S)
