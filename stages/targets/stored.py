"""The weights of a target as its files have them, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from stages.errors import EagleError
from stages.targets.hub import at_hand

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder's safetensors files by name, each read when it is asked for."""

    files: dict[str, Path]

    @classmethod
    def of(cls, folder: Path) -> StoredWeights | None:
        """None when the folder keeps its weights in another form."""
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls({name: folder / file for name, file in named.items()})
        if not single.is_file():
            return None
        with safe_open(single, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), single))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor; reads the headers alone."""
        found: dict[str, tuple[int, ...]] = {}
        for path in sorted(set(self.files.values())):
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    def tensor(self, name: str) -> Tensor:
        """A view of the file: what is not looked at is not read."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def get(self, name: str, loaded: Tensor) -> Tensor:
        """The stored tensor of that name, or `loaded` where the files have none of its shape."""
        if name not in self.files:
            return loaded
        tensor = self.tensor(name)
        return tensor if tensor.shape == loaded.shape else loaded


def local_folder(path: str, name: str) -> Path:
    """Where the files of a model folder or a hub id lie on this machine.

    Raises:
        EagleError: the hub does not give them.
    """
    if Path(path := at_hand(path)).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, access, a wrong id: the hub's errors have no common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise EagleError(
            f"cannot load target {name}: it is no local folder, and the hub does not give it: {reason}"
        ) from error
