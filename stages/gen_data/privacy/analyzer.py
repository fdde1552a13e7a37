"""The search on this machine: presidio's analyzer with our recognizers, without any network access."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import presidio_analyzer
import regex
from presidio_analyzer import (
    AnalyzerEngine,
    EntityRecognizer,
    PatternRecognizer,
    RecognizerRegistry,
    predefined_recognizers,
)
from presidio_analyzer.context_aware_enhancers import LemmaContextAwareEnhancer
from presidio_analyzer.nlp_engine import NlpArtifacts, NlpEngine
from presidio_analyzer.pattern_recognizer import REGEX_TIMEOUT_SECONDS

from stages.errors import EagleError
from stages.gen_data.privacy.crypto import Wallet
from stages.gen_data.privacy.detector import ERROR, TIMEOUT, TOO_LONG, Scan, Unscannable
from stages.gen_data.privacy.email import Email
from stages.gen_data.privacy.finding import Finding, resolve
from stages.gen_data.privacy.form import Form
from stages.gen_data.privacy.ip import PublicIp
from stages.gen_data.privacy.names import LanguageModel
from stages.gen_data.privacy.normal import NormalText, normalise
from stages.gen_data.privacy.numbers import CreditCard, Iban, UsSsn
from stages.gen_data.privacy.phone import Phone
from stages.gen_data.privacy.rules import NAME_ENTITIES, Allowed, OwnRecognizer, Search
from stages.gen_data.privacy.secrets import Secret
from stages.gen_data.privacy.url import Url

_OURS: tuple[type[Form], ...] = (Email, Phone, CreditCard, Iban, UsSsn, PublicIp, Wallet, Secret, Url)
_CONTEXT_WORDS = 8
_WORD = regex.compile(r"\w+|[^\w\s]")


class _Timeouts(logging.Filter):
    """Stands before presidio's log and lets nothing through, as messages may quote what was found.

    presidio leaves out an expression that times out, and says so in its log only: this notes it, for the
    thread it happened in. The time alone does not tell: that of expressions is taken by the processor's
    clock, which goes faster than the wall's where other threads of the process work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()

    @property
    def seen(self) -> bool:
        """Whether an expression has timed out in this thread since ``forget``."""
        return getattr(self._thread, "seen", False)

    def forget(self) -> None:
        self._thread.seen = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], TimeoutError):
            self._thread.seen = True
        return False


_timeouts = _Timeouts()


class PresidioDetector:
    """Searches texts one by one. Texts that none of our recognizers has a use for never reach presidio."""

    def __init__(self, search: Search) -> None:
        """Raises EagleError: an entity is unknown, or the model for names is not installed."""
        logger = logging.getLogger("presidio-analyzer")
        logger.setLevel(logging.WARNING)
        logger.addFilter(_timeouts)
        self._search = search
        self._recognizers = make_recognizers(search)
        self.forms = [each for each in self._recognizers if isinstance(each, Form)]
        self._always = len(self.forms) < len(self._recognizers)
        self._engine = _make_engine(search, self._recognizers)
        self._entities = list(search.entities)
        self._least = min(map(search.threshold_of, search.entities))
        self._first = frozenset(search.rules.drop)
        self._allowed = Allowed(search.rules)
        self._limit = min(search.rules.timeout_s, REGEX_TIMEOUT_SECONDS)

    def scan(self, texts: Sequence[str]) -> list[Scan]:
        return [self._scan(text) for text in texts]

    def _scan(self, text: str) -> Scan:
        start = time.monotonic()
        _timeouts.forget()
        try:
            if len(text) > self._search.rules.max_chars:
                return Unscannable(TOO_LONG)
            normal = normalise(text)
            if len(normal.text) > 2 * self._search.rules.max_chars:  # one character can stand for eighteen
                return Unscannable(TOO_LONG)
            found = resolve(self._find(text, normal), self._first)
        except TimeoutError:
            return Unscannable(TIMEOUT)
        except Exception as error:  # whatever went wrong, text that was not searched must not pass
            return Unscannable(ERROR, type(error).__name__)
        if _timeouts.seen or time.monotonic() - start >= self._limit:
            return Unscannable(TIMEOUT)
        return found

    def _find(self, text: str, normal: NormalText) -> Iterator[Finding]:
        if not self._always and not any(form.may_find(normal.text) for form in self.forms):
            return
        results = self._engine.analyze(
            normal.text, self._search.language, entities=self._entities, score_threshold=self._least
        )
        for result in results:
            if result.score < self._search.threshold_of(result.entity_type) or result.start >= result.end:
                continue
            start, end = normal.original(result.start, result.end)
            if not self._allowed.has(text[start:end]):
                form = (result.recognition_metadata or {}).get("recognizer_name", "")
                yield Finding(start, end, result.entity_type, round(result.score, 4), form)


def make_recognizers(search: Search) -> list[EntityRecognizer]:
    """One recognizer or more for every entity that is searched for.

    Raises:
        EagleError: an entity is unknown.
    """
    own = {recognizer.supported_entity for recognizer in search.rules.recognizers}
    ours = {form.entity: form for form in _OURS}
    recognizers: list[EntityRecognizer] = [
        ours[entity](search.language) for entity in search.entities if entity in ours
    ]
    names = list(search.names)
    if names:
        recognizers.append(
            predefined_recognizers.SpacyRecognizer(
                supported_language=search.language, supported_entities=names
            )
        )
    others = set(search.entities) - set(ours) - own - (set(names) - {"DATE_TIME"})
    recognizers += _predefined(others, own | set(names), search.language)
    recognizers += [_own(each, search.language) for each in search.rules.recognizers]
    return recognizers


def _predefined(entities: set[str], found_otherwise: set[str], language: str) -> list[EntityRecognizer]:
    """presidio's recognizers by form for some entities; those that ask services are none of these.

    Raises:
        EagleError: there is none.
    """
    if not entities:
        return []
    known: dict[str, list[EntityRecognizer]] = {}
    for each in vars(predefined_recognizers).values():
        if isinstance(each, type) and issubclass(each, PatternRecognizer) and each is not PatternRecognizer:
            recognizer = each(supported_language=language)  # type: ignore[call-arg]  # each has an entity
            for entity in recognizer.supported_entities:
                known.setdefault(entity, []).append(recognizer)
    missing = sorted(entities - known.keys() - found_otherwise)
    if missing:
        names = {form.entity for form in _OURS} | set(NAME_ENTITIES)
        close = [each for name in missing for each in get_close_matches(name, sorted(names | known.keys()))]
        raise EagleError(
            f"--pii-entities {', '.join(missing)}: unknown; use "
            f"{', '.join(close or sorted(names))}, or another name of presidio's recognizers"
        )
    return [recognizer for entity in sorted(entities & known.keys()) for recognizer in known[entity]]


def _own(recognizer: OwnRecognizer, language: str) -> PatternRecognizer:
    return PatternRecognizer(
        supported_entity=recognizer.supported_entity,
        name=recognizer.name,
        supported_language=language,
        patterns=[presidio_analyzer.Pattern(p.name, p.regex, p.score) for p in recognizer.patterns],
        deny_list=list(recognizer.deny_list),
        context=list(recognizer.context),
    )


def _make_engine(search: Search, recognizers: list[EntityRecognizer]) -> AnalyzerEngine:
    nlp: NlpEngine = (
        LanguageModel(search.language, search.model) if search.names else Words(search.language, recognizers)
    )
    return AnalyzerEngine(
        registry=RecognizerRegistry(recognizers=recognizers, supported_languages=[search.language]),
        nlp_engine=nlp,
        supported_languages=[search.language],
        context_aware_enhancer=LemmaContextAwareEnhancer(
            context_prefix_count=_CONTEXT_WORDS, context_matching_mode="whole_word"
        ),
    )


class Words(NlpEngine):
    """The words of a text, for the context words of recognizers; nothing where none has any.

    A language model's tags and names would be of no use to them and take most of the time of a search.
    """

    engine_name = "words"
    is_available = True

    def __init__(self, language: str, recognizers: Iterable[EntityRecognizer]) -> None:
        self._language = language
        self._needed = any(recognizer.context for recognizer in recognizers)
        self._none = self._artifacts([])

    def load(self) -> None:
        """Nothing to load."""

    def is_loaded(self) -> bool:
        return True

    def process_text(self, text: str, language: str) -> NlpArtifacts:
        return self._artifacts(list(_WORD.finditer(text))) if self._needed else self._none

    def _artifacts(self, words: list[regex.Match[str]]) -> NlpArtifacts:
        return NlpArtifacts(
            entities=[],
            tokens=[word[0] for word in words],  # type: ignore[arg-type]  # only counted and measured
            tokens_indices=[word.start() for word in words],
            lemmas=[word[0].lower() for word in words],
            nlp_engine=self,
            language=self._language,
        )

    def process_batch(
        self, texts: Iterable[str], language: str, batch_size: int = 1, n_process: int = 1, **_: object
    ) -> Iterator[tuple[str, NlpArtifacts]]:
        return ((text, self.process_text(text, language)) for text in texts)

    def is_stopword(self, word: str, language: str) -> bool:
        return False

    def is_punct(self, word: str, language: str) -> bool:
        return not word[:1].isalnum()

    def get_supported_entities(self) -> list[str]:
        return []

    def get_supported_languages(self) -> list[str]:
        return [self._language]
