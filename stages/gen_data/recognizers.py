"""What counts as personal data in a prompt, as presidio recognizers without any network access.

presidio's recognizers for e-mail, phone, card, IBAN, SSN and IP, made stricter or more telling where prompts
need it: many hold numbers, and a placeholder in place of a summand spoils the prompt. Scores work as
presidio's do: what is sure by its form alone gets 0.5 or more, anything else needs a word such as "phone"
before it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

import tldextract
from presidio_analyzer import AnalyzerEngine, EntityRecognizer, Pattern, RecognizerRegistry, RecognizerResult
from presidio_analyzer.context_aware_enhancers import LemmaContextAwareEnhancer
from presidio_analyzer.nlp_engine import NlpArtifacts, NlpEngine
from presidio_analyzer.predefined_recognizers import (
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    PhoneRecognizer,
    UsSsnRecognizer,
)

LANGUAGE = "en"
MIN_SCORE = 0.5
SURE = 0.6
NEEDS_CONTEXT = 0.4

_PHONE_WORDS = [
    "phone", "phones", "telephone", "tel", "cell", "cellphone", "mobile", "fax", "whatsapp", "sms", "dial",
    "call", "hotline", "landline", "voicemail",
]  # fmt: skip
_SSN_WORDS = ["ssn", "ssns", "security"]
_CONTEXT_WORDS = 8
_CARD_NUMBERS = [  # issuer prefix and number of digits; separators anywhere a card has them
    r"4\d{3}(?:[ -]?\d{4}){3}",  # Visa
    r"(?:5[1-5]\d{2}|222[1-9]|22[3-9]\d|2[3-6]\d{2}|27[01]\d|2720)(?:[ -]?\d{4}){3}",  # Mastercard
    r"3[47]\d{2}[ -]?\d{6}[ -]?\d{5}",  # American Express
    r"(?:6011|64[4-9]\d|65\d{2}|62\d{2})(?:[ -]?\d{4}){3}",  # Discover, UnionPay
    r"35(?:2[89]|[3-8]\d)(?:[ -]?\d{4}){3}",  # JCB
    r"3(?:0[0-5]|[68]\d)\d[ -]?\d{6}[ -]?\d{4}",  # Diners
]
# Three groups as North America writes them; what separates the first two tells them from three numbers.
_NORTH_AMERICAN = re.compile(r"(?:\+?1[-. ]?)?(?:\(\d{3}\) ?|\d{3}([-.]))\d{3}[-. ]\d{4}")
# Area code with its leading zero, then groups: 020 7946 0958. Not 0.79460958, not 06 12 18 24 30.
_TRUNK_ZERO = re.compile(r"\(?0\d{2,4}\)?[- /]\d{3,}(?:[- ]\d{3,})*")
_VERSION_BEFORE = re.compile(r"(?:\bv|\bver\.?|version|release|build|firmware)[\s:=]*$", re.IGNORECASE)
_WORD = re.compile(r"\w+|[^\w\s]")
_IPV6_IN_USE = ipaddress.ip_network("2000::/3")

# The suffix list inside the package, instead of the one it would fetch.
_domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


class Email(EmailRecognizer):
    """An address whose domain ends in a public suffix.

    Repetitions are bounded: presidio's own expression takes a minute for 20,000 characters without a space.
    """

    def __init__(self) -> None:
        super().__init__(
            patterns=[
                Pattern(
                    "address",
                    r"\w[\w.!#$%&'*+/=?^~-]{0,63}@(?:\w(?:[\w-]{0,61}\w)?\.){1,8}\w(?:[\w-]{0,61}\w)?\b",
                    MIN_SCORE,
                )
            ]
        )

    def validate_result(self, pattern_text: str) -> bool:
        return _domains(pattern_text.rpartition("@")[2]).top_domain_under_public_suffix != ""


class Phone(PhoneRecognizer):
    """A number that is valid somewhere, sure if it is also written as phone numbers are."""

    def __init__(self) -> None:
        super().__init__(context=_PHONE_WORDS, leniency=1)  # 1: valid, grouped in any way

    def analyze(
        self, text: str, entities: list[str], nlp_artifacts: NlpArtifacts | None = None
    ) -> list[RecognizerResult]:
        found = super().analyze(text, entities, nlp_artifacts)  # type: ignore[arg-type]
        for result in found:
            result.score = SURE if _is_written_as_phone(text[result.start : result.end]) else NEEDS_CONTEXT
        return [result for result in found if not _continues(text, result.start, result.end)]


class CreditCard(CreditCardRecognizer):
    """A number that an issuer could have given out and whose check digit is right."""

    def __init__(self) -> None:
        numbers = "|".join(_CARD_NUMBERS)
        super().__init__(patterns=[Pattern("issuer", rf"(?<![\w.-])(?:{numbers})(?![\w-])(?!\.\d)", 0.3)])


class UsSsn(UsSsnRecognizer):
    """Hyphens make it sure; other spellings need a word."""

    def __init__(self) -> None:
        super().__init__(
            patterns=[
                Pattern("hyphens", r"(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-])(?!\.\d)", MIN_SCORE),
                Pattern("spaces or dots", r"(?<![\w.-])\d{3}([ .])\d{2}\1\d{4}(?![\w-])(?!\.\d)", 0.2),
                Pattern("digits", r"(?<![\w.-])\d{9}(?![\w-])(?!\.\d)", 0.2),
            ],
            context=_SSN_WORDS,
        )


class PublicIp(IpRecognizer):
    """An address on the public internet; private, loopback and documentation addresses are nobody's."""

    def analyze(
        self,
        text: str,
        entities: list[str],
        nlp_artifacts: NlpArtifacts | None = None,
        regex_flags: int | None = None,
    ) -> list[RecognizerResult]:
        found = super().analyze(text, entities, nlp_artifacts, regex_flags)
        return [
            result
            for result in found
            if not _VERSION_BEFORE.search(text, max(0, result.start - 20), result.start)
        ]

    def invalidate_result(self, pattern_text: str) -> bool:
        try:
            address = ipaddress.ip_interface(pattern_text).ip
        except ValueError:
            return True
        if isinstance(address, ipaddress.IPv6Address):
            if (inner := address.ipv4_mapped) is not None:
                return not inner.is_global
            # Outside 2000::/3 no address is in use, but `face::add` of C++ would be one.
            return not address.is_global or address not in _IPV6_IN_USE
        return not address.is_global


class Words(NlpEngine):
    """The words of a text, for the context rule.

    A language model's tags and names are of no use to the recognizers above and would take most of the time
    of a scan; spaCy's tokenizer alone takes minutes over ten thousand symbols in a row.
    """

    engine_name = "words"
    is_available = True

    def load(self) -> None:
        """Nothing to load."""

    def is_loaded(self) -> bool:
        return True

    def process_text(self, text: str, language: str) -> NlpArtifacts:
        words = list(_WORD.finditer(text))
        return NlpArtifacts(
            entities=[],
            tokens=[word[0] for word in words],  # type: ignore[arg-type]  # only counted and measured
            tokens_indices=[word.start() for word in words],
            lemmas=[word[0].lower() for word in words],
            nlp_engine=self,
            language=language,
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
        return [LANGUAGE]


def make_analyzer() -> AnalyzerEngine:
    """presidio with the recognizers of this file; loads no model and opens no connection."""
    recognizers: list[EntityRecognizer] = [
        Email(),
        Phone(),
        CreditCard(),
        IbanRecognizer(),
        UsSsn(),
        PublicIp(),
    ]
    return AnalyzerEngine(
        registry=RecognizerRegistry(recognizers=recognizers),
        nlp_engine=Words(),
        context_aware_enhancer=LemmaContextAwareEnhancer(
            context_prefix_count=_CONTEXT_WORDS, context_matching_mode="whole_word"
        ),
        default_score_threshold=MIN_SCORE,
    )


def _is_written_as_phone(number: str) -> bool:
    return number.startswith("+") or any(form.fullmatch(number) for form in (_NORTH_AMERICAN, _TRUNK_ZERO))


def _continues(text: str, start: int, end: int) -> bool:
    """Whether the digits go on outside the match, which makes it a part of some longer number."""
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    return bool(re.search(r"\w$|\d[.,/*^:-]$", before) or re.match(r"\w|[.,/*^:-]\d", after))
