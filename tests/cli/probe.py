"""A stage of the shape all stages have, that does what a test asks of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from eagle_cli.catalog import Stage
from stages.config import Bytes, CommonConfig, Positional, StageConfig
from stages.errors import EagleError
from stages.progress import Reporter


class ProbeConfig(CommonConfig):
    """One field of every type that a flag can have."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Answers": ("rate",)}

    act: Literal["answer", "chatter", "refuse", "break", "fill", "wait"] = Field(description="What to do.")
    prompts: tuple[str, ...] = Field(default=("builtin:chat",), description="Sources.")
    names: list[str] = Field(default=[], description="Names.")
    max_prompts: int | None = Field(default=None, ge=1, description="At most so many.")
    room: Bytes = Field(default=3 * 2**20, ge=1, description="A size.")
    most: Bytes | None = Field(default=None, description="Another.")
    rate: float = Field(default=0.5, description="A share.")
    scrub: bool = Field(default=True, description="Redact.")

    @field_validator("rate")
    @classmethod
    def _share(cls, rate: float) -> float:
        if not 0 <= rate <= 1:
            raise ValueError("a share lies between 0 and 1")
        return rate


class ProbeResult(BaseModel):
    """What the stage was told."""

    config: ProbeConfig

    def summary(self) -> str:
        return f"[done] with {self.config.act}"


def run(config: ProbeConfig, report: Reporter) -> ProbeResult:
    """Does `config.act`."""
    report.log("probe starts")
    if config.act == "chatter":
        sys.stdout.write("python\n")
        os.write(1, b"native\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    if config.act == "refuse":
        raise EagleError("prompts /nowhere do not exist;\ngive a file")
    if config.act == "break":
        raise ZeroDivisionError("a broken invariant")
    if config.act == "fill":
        bytearray(1 << 62)
    if config.act == "wait":
        report.log("waiting")
        time.sleep(60)
    return ProbeResult(config=config)


@dataclass(frozen=True)
class ProbeStage(Stage):
    """The probe in the place of a stage of the catalog."""

    name: str = "gen-data"
    config_name: str = "ProbeConfig"
    summary: str = "Does what a test asks."

    def config_class(self) -> type[ProbeConfig]:
        return ProbeConfig

    def run(self) -> Callable[..., Any]:
        return run


class PlacedConfig(StageConfig):
    """Fields that are given by their place."""

    uri: Annotated[str, Positional()] = Field(max_length=10, description="What to open.")
    others: Annotated[list[str], Positional()] = Field(default=[], description="More of it.")
    row_start: int = Field(default=0, description="Where to begin.")


class PlacedResult(BaseModel):
    config: PlacedConfig

    def summary(self) -> str:
        return self.config.uri


@dataclass(frozen=True)
class PlacedStage(Stage):
    """A stage with an argument."""

    name: str = "gen-data"
    config_name: str = "PlacedConfig"
    summary: str = "Opens what it is given."

    def config_class(self) -> type[PlacedConfig]:
        return PlacedConfig

    def run(self) -> Callable[..., Any]:
        return lambda config, report: PlacedResult(config=config)
