"""Models of the Hugging Face hub: whether it has one, asked once and without trying for a minute."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stages.errors import EagleError

ANSWER_S = 10.0
"""Longest wait, in seconds, for the hub's first answer."""


def at_hand(path: str) -> str:
    """What transformers is to load for a local folder or a hub id: what was given; or, while the hub does not
    answer, the folder of the copy that this machine has.

    The clients of transformers would try each file again for half a minute.

    Raises:
        EagleError: the hub has no such model, or does not answer, and there is no copy.
    """
    return path if Path(path).exists() else _on_hub(path)


@cache
def _on_hub(name: str) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if HF_HUB_OFFLINE:
        return name
    try:
        HfApi().model_info(name, timeout=ANSWER_S)
    except HFValidationError:
        raise EagleError(
            f"target {name} is neither a folder nor a hub id such as org/model: check the path"
        ) from None
    except RepositoryNotFoundError:
        raise EagleError(
            f"target {name} is no local folder, and the hub has no such model or does not show it to you: "
            "check the name, or log in with hf auth login"
        ) from None
    except HfHubHTTPError:  # a mirror may answer only for files
        return name
    except Exception as error:  # network, proxy, certificates: the client's own errors have no base
        try:
            return snapshot_download(name, local_files_only=True)
        except Exception:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise EagleError(
                f"target {name} is no local folder, and the hub does not answer ({reason}): check the path "
                "and the network"
            ) from None
    return name
