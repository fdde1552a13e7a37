"""What `eagle gen-data` can be told about personal data."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from stages.config import StageConfig

DEFAULT_ENTITIES = (
    "EMAIL_ADDRESS",
    "PHONE_NUMBER",
    "CREDIT_CARD",
    "IBAN_CODE",
    "US_SSN",
    "IP_ADDRESS",
    "CRYPTO",
    "SECRET",
)
DEFAULT = "DEFAULT"


class PrivacyConfig(StageConfig):
    """One field is one flag; the description is its help text."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Personal data and secrets": (
            "pii",
            "pii_entities",
            "pii_threshold",
            "pii_language",
            "pii_config",
            "pii_responses",
            "pii_report",
            "pii_engine",
        )
    }

    pii: Literal["redact", "drop", "flag", "off"] = Field(
        default="redact",
        description="What to do with personal data in prompts: replace it by a placeholder such as "
        "<EMAIL_ADDRESS>, drop the prompt, only count it, or not look for it. Prompts with secrets or many "
        "findings are dropped under redact too; those that cannot be searched always are.",
    )
    pii_entities: list[str] = Field(
        default=list(DEFAULT_ENTITIES),
        min_length=1,
        description="What to look for, may be given several times or with commas. `default` stands for "
        f"{', '.join(DEFAULT_ENTITIES)}; there are also PERSON, LOCATION, ORGANIZATION, DATE_TIME, URL, and "
        "the names that presidio knows, such as UK_NHS.",
    )
    pii_threshold: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Least score of a finding; what its form makes sure has 0.5 or more.",
    )
    pii_language: str = Field(
        default="en",
        pattern=r"^[a-z]{2,3}$",
        description="Language of the names and dates to look for; other personal data are found in any "
        "language.",
    )
    pii_config: str | None = Field(
        default=None,
        description="YAML file, local or remote, with recognizers, thresholds and limits of your own.",
    )
    pii_responses: bool = Field(
        default=True,
        description="Search the answers too, and drop conversations with a finding in one (--pii flag: "
        "count them).",
    )
    pii_report: str | None = Field(
        default=None,
        description="JSON Lines file to write with a sample of the findings, masked, for a person to check.",
    )
    pii_engine: Literal["presidio", "dlp"] = Field(
        default="presidio",
        description="What searches: presidio on this machine, or Google's Sensitive Data Protection, which "
        "gets the prompts to see (needs the extra dlp).",
    )

    @field_validator("pii_entities")
    @classmethod
    def _name_entities(cls, given: list[str]) -> list[str]:
        names = [name.strip().upper() for text in given for name in text.split(",") if name.strip()]
        wrong = [name for name in names if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name)]
        if wrong or not names:
            raise ValueError("give names such as EMAIL_ADDRESS, or default")
        each = [entity for name in names for entity in (DEFAULT_ENTITIES if name == DEFAULT else (name,))]
        return list(dict.fromkeys(each))
