"""The stages by name. Nothing of a stage is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

CONTINUES = "run the same command again to continue"


@dataclass(frozen=True)
class Stage:
    """One subcommand.

    Attributes:
        name: what a person types, such as "gen-data".
        config_name: the configuration model in the stage's config.py.
        summary: its line in `eagle --help`.
        when_stopped: what a person who stopped it should know.
        section: the heading above it in `eagle --help`.
        spare_memory: what to do when there is not enough.
    """

    name: str
    config_name: str
    summary: str
    when_stopped: str = CONTINUES
    section: str = "Stages"
    spare_memory: str = "free some, or use a machine with more"

    @property
    def package(self) -> str:
        return f"stages.{self.name.replace('-', '_')}"

    def config_class(self) -> type[BaseModel]:
        """The configuration model; importing it is light."""
        config_class: type[BaseModel] = getattr(
            importlib.import_module(f"{self.package}.config"), self.config_name
        )
        return config_class

    def run(self) -> Callable[..., Any]:
        """The function that does the work; importing it is heavy."""
        run: Callable[..., Any] = importlib.import_module(f"{self.package}.stage").run
        return run

    def environment_variable(self, flag: str) -> str:
        """The variable that stands in for a flag: `max-prompts` of gen-data is EAGLE_GEN_DATA_MAX_PROMPTS."""
        return f"EAGLE_{self.name}_{flag}".replace("-", "_").upper()


STAGES = (
    Stage(
        "gen-data",
        "GenDataConfig",
        "Prompts to conversations: the target's own answers, as token ids.",
        spare_memory=f"lower --batch-size, and {CONTINUES}",
    ),
    Stage(
        "extract-features",
        "ExtractFeaturesConfig",
        "Conversations to features: the target's hidden states.",
        spare_memory="give --device-map auto, or lower --forward-tokens and give --overwrite",
    ),
    Stage(
        "train",
        "TrainConfig",
        "Features to a draft head.",
        spare_memory=f"lower --micro-batch-tokens or give --recompute, and {CONTINUES}",
    ),
    Stage(
        "serve",
        "ServeConfig",
        "Target and draft head to an OpenAI-compatible server.",
        "the server has stopped",
        spare_memory="lower --max-batch, --max-model-len or --kv-memory",
    ),
    Stage(
        "bench",
        "BenchConfig",
        "Speed, acceptance and losslessness of a draft head, against plain decoding.",
        spare_memory="lower the largest --concurrency or --max-new-tokens",
    ),
    Stage(
        "convert",
        "ConvertConfig",
        "Hidden states and heads that speculators, SpecForge or EAGLE made, to artifacts.",
        section="Tools",
        spare_memory="lower --shard-bytes",
    ),
    Stage(
        "inspect",
        "InspectConfig",
        "What an artifact is: its lineage, its rows, and whether it is still whole.",
        "nothing was changed",
        section="Tools",
        spare_memory="lower --rows",
    ),
)
