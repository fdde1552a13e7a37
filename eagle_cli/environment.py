"""What libraries are told before they are imported: no telemetry, no chatter. A user's own settings win."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from stages.errors import EagleWarning

_DEFAULTS = {
    "DATASETS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare(*, quiet: bool) -> None:
    """Sets defaults for environment variables, warnings and logging; call before importing a stage.

    Args:
        quiet: also hides the progress bars of libraries; so does a stderr that is no terminal.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        if not quiet:
            warnings.simplefilter("default", EagleWarning)
            warnings.formatwarning = _one_line
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself


def _one_line(message: Warning | str, *_place: object, **_line: object) -> str:
    return f"warning: {message}\n"
