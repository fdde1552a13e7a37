"""What only a language model can find: names of people, places and organisations, and dates."""

from __future__ import annotations

import spacy
from presidio_analyzer.nlp_engine import NerModelConfiguration, NlpArtifacts, SpacyNlpEngine

from stages.errors import EagleError

_LABELS = {
    "PER": "PERSON", "PERSON": "PERSON", "GPE": "LOCATION", "LOC": "LOCATION", "FAC": "LOCATION", "LOCATION":
    "LOCATION",
    "ORG": "ORGANIZATION", "ORGANIZATION": "ORGANIZATION", "DATE": "DATE_TIME", "TIME": "DATE_TIME",
}  # fmt: skip
_OTHER_LABELS = (
    "CARDINAL", "EVENT", "LANGUAGE", "LAW", "MISC", "MONEY", "NORP", "ORDINAL", "PERCENT", "PRODUCT",
    "QUANTITY", "WORK_OF_ART",
)  # fmt: skip
_NOT_NEEDED = ("parser", "lemmatizer", "tagger", "attribute_ruler", "morphologizer")

_UNSPACED = ("ja", "ko", "th", "zh")
MAX_RUN = 1000
"""Longest stretch without a space, in characters: the tokenizer's time grows with its square."""


class UnusualTextError(Exception):
    """A text that cannot be searched for names in a sensible time."""


class LanguageModel(SpacyNlpEngine):
    """presidio's spaCy engine with the parts that find names only, on the CPU, and never downloaded."""

    def __init__(self, language: str, model: str) -> None:
        super().__init__(
            models=[{"lang_code": language, "model_name": model}],
            ner_model_configuration=NerModelConfiguration(
                model_to_presidio_entity_mapping=_LABELS, labels_to_ignore=_OTHER_LABELS
            ),
        )

    def load(self) -> None:
        """Raises EagleError: the model is not installed."""
        [model] = self.models
        language, name = model["lang_code"], model["model_name"]
        try:
            self.nlp = {language: spacy.load(name, exclude=_NOT_NEEDED)}  # type: ignore[assignment]
        except OSError:
            raise EagleError(
                f"the spaCy model {name} for language {language} is not installed, and nothing is "
                "downloaded while eagle runs: pip install it, or name another one under models in "
                "--pii-config"
            ) from None

    def process_text(self, text: str, language: str) -> NlpArtifacts:
        """Raises UnusualTextError: a stretch without spaces would take the tokenizer minutes."""
        if language not in _UNSPACED and max(map(len, text.split()), default=0) > MAX_RUN:
            raise UnusualTextError
        doc = self.get_nlp(language)(text)
        entities, scores = self._get_updated_entities(list(doc.ents), self._get_scores_for_entities(doc))
        return NlpArtifacts(
            entities=entities,
            tokens=doc,
            tokens_indices=[token.idx for token in doc],
            # There is no lemmatizer: context words are compared as they are.
            lemmas=[token.lower_ for token in doc],
            nlp_engine=self,
            language=language,
            scores=scores,
        )
