"""What our recognizers have in common: a presidio recognizer that finds by form, quickly or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import regex
from presidio_analyzer import LocalRecognizer, RecognizerResult
from presidio_analyzer.nlp_engine import NlpArtifacts

from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.finding import Finding

SURE = 0.9
LIKELY = 0.6
"""Scores. What is sure by its form alone gets 0.5 or more; anything else needs words around it that say
so."""


class Form(LocalRecognizer):
    """Base of our recognizers.

    Attributes:
        entity: the only one it finds.
        hint: an expression that every text with a finding matches, cheap enough to try on every text.
    """

    entity: ClassVar[str]
    hint: ClassVar[regex.Pattern[str]]

    def __init__(self, language: str) -> None:
        super().__init__(supported_entities=[self.entity], supported_language=language)

    def load(self) -> None:
        """Nothing to load."""

    @abstractmethod
    def find(self, text: str) -> Iterator[Finding]:
        """Everything of the kind in a text in normal form.

        Raises:
            TimeoutError: an expression searches longer than allowed.
        """

    def may_find(self, text: str) -> bool:
        """False if the text has nothing of the kind for certain."""
        return self.hint.search(text, timeout=MATCH_S) is not None

    def analyze(
        self, text: str, entities: list[str], nlp_artifacts: NlpArtifacts | None = None
    ) -> list[RecognizerResult]:
        """What presidio calls; the finding's form stands in for the recognizer's name."""
        if not self.may_find(text):
            return []
        return [
            RecognizerResult(
                finding.entity,
                finding.start,
                finding.end,
                finding.score,
                recognition_metadata={
                    RecognizerResult.RECOGNIZER_NAME_KEY: finding.form,
                    RecognizerResult.RECOGNIZER_IDENTIFIER_KEY: self.id,
                },
            )
            for finding in self.find(text)
        ]
