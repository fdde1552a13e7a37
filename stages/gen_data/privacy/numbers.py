"""Numbers with a check: payment cards, bank accounts, US social security numbers."""

from __future__ import annotations

from collections.abc import Iterator

import regex

from stages.gen_data.privacy.context import MATCH_S, after, before, looks_like_maths, words
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, SURE, Form

# Issuers' prefixes and numbers of digits; separators where a card has them.
_CARD = regex.compile(
    r"(?<![0-9A-Za-z_.\-])(?<!\d{4} )(?:"
    r"4\d{3}(?:([ \-]?)\d{4})(?:\1\d{4}){2}"  # Visa
    r"|(?:5[1-5]\d{2}|222[1-9]|22[3-9]\d|2[3-6]\d{2}|27[01]\d|2720)"  # Mastercard
    r"(?:([ \-]?)\d{4})(?:\2\d{4}){2}"
    r"|3[47]\d{2}([ \-]?)\d{6}\3\d{5}"  # American Express
    r"|(?:6011|64[4-9]\d|65\d{2}|62\d{2})(?:([ \-]?)\d{4})(?:\4\d{4}){2}"  # Discover, UnionPay
    r"|35(?:2[89]|[3-8]\d)(?:([ \-]?)\d{4})(?:\5\d{4}){2}"  # JCB
    r"|3(?:0[0-5]|[68]\d)\d([ \-]?)\d{6}\6\d{4}"  # Diners
    r")(?![0-9A-Za-z_\-])(?![.,]\d)(?! (?!20[2-4]\d)\d{4}\b)"
)

# Length of an account number by country, as in the register of ISO 13616.
_IBAN_LENGTHS = {
    code: int(length)
    for length, codes in {
        "15": "NO", "16": "BE", "18": "DK FI FO GL NL FK SD", "19": "MK SI", "20": "AT BA EE KZ LT LU XK MN",
        "21": "CH HR LI LV", "22": "BG BH CR DE GB GE IE ME RS VA", "23": "AE GI IL IQ TL OM SO",
        "24": "AD CZ ES MD PK RO SA SE SK TN VG DZ", "25": "PT ST LY", "26": "IS TR BI",
        "27": "FR GR IT MC MR SM DJ CF CG CI GA KM TD TG BF BJ CM ML MZ SN",
        "28": "AL AZ CY DO GT HN HU LB NI PL BY SV",
        "29": "BR EG PS QA UA", "30": "JO KW MU YE", "31": "MT SC", "32": "LC", "33": "RU",
    }.items()
    for code in codes.split()
}  # fmt: skip
_IBAN = regex.compile(
    r"(?<![A-Za-z0-9])(?:[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]){11,30}|[a-z]{2}\d{2}(?:[ \-]?[a-z0-9]){11,30})"
)
_IBAN_WORDS = words("iban", "account", "konto", "compte", "cuenta", "conto", "bank", "银行")

_SSN = regex.compile(
    r"(?<![0-9A-Za-z_.\-])(?<!\d[ ,/])(?:\d{3}(?P<sign>[ "
    r".\-])\d{2}(?P=sign)\d{4}|\d{9})(?![0-9A-Za-z_\-])(?![.,]\d)"
)
_SSN_WORDS = words(
    r"ssns?", r"ss\s?\#", r"social security", r"social", r"soc\.? sec", r"tax(?:payer)? id", "seguro social"
)


class CreditCard(Form):
    """A number that an issuer could have given out and whose check digit is right."""

    entity = "CREDIT_CARD"
    hint = regex.compile(r"[2-6]\d{3}[ \-]?\d{4}|3\d{3}[ \-]?\d{6}")

    def find(self, text: str) -> Iterator[Finding]:
        for match in _CARD.finditer(text, timeout=MATCH_S):
            if passes_luhn(match[0]):
                yield Finding(match.start(), match.end(), self.entity, SURE)


class Iban(Form):
    """An account number of the length its country uses and whose check digits are right."""

    entity = "IBAN_CODE"
    hint = regex.compile(r"[A-Z]{2}\d\d[ \-]?[A-Z0-9]", regex.IGNORECASE)

    def find(self, text: str) -> Iterator[Finding]:
        for match in _IBAN.finditer(text, timeout=MATCH_S):
            end = _end_of_iban(text, match.start(), match.end())
            if end is None:
                continue
            shown = text[match.start() : end]
            if shown.isupper() or _IBAN_WORDS.search(before(text, match.start()), timeout=MATCH_S):
                yield Finding(match.start(), end, self.entity, SURE)


class UsSsn(Form):
    """Hyphens make it sure, unless it is a calculation; other spellings need a word."""

    entity = "US_SSN"
    hint = regex.compile(r"\d{3}([ .\-]?)\d\d\1\d{4}")

    def find(self, text: str) -> Iterator[Finding]:
        for match in _SSN.finditer(text, timeout=MATCH_S):
            digits = "".join(c for c in match[0] if c.isdigit())
            if not could_be_ssn(digits):
                continue
            said = _SSN_WORDS.search(before(text, match.start()), timeout=MATCH_S) or _SSN_WORDS.search(
                after(text, match.end()), timeout=MATCH_S
            )
            if said:
                yield Finding(match.start(), match.end(), self.entity, SURE)
            elif match["sign"] == "-" and not (
                all(number % 10 == 0 for number in map(int, match[0].split("-")))
                or looks_like_maths(text, match.start(), match.end())
            ):
                yield Finding(match.start(), match.end(), self.entity, LIKELY)


def passes_luhn(number: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1); separators are skipped."""
    digits = [int(c) for c in reversed(number) if c.isdigit()]
    return sum(d if i % 2 == 0 else (2 * d - 9 if d > 4 else 2 * d) for i, d in enumerate(digits)) % 10 == 0


def could_be_ssn(digits: str) -> bool:
    """Whether nine digits are in the ranges that are given out."""
    return (
        digits[:3] not in ("000", "666") and digits[0] != "9" and digits[3:5] != "00" and digits[5:] != "0000"
    )


def is_iban(compact: str) -> bool:
    """Whether an account number without separators has its country's length and its check digits (ISO
    7064)."""
    if _IBAN_LENGTHS.get(compact[:2]) != len(compact):
        return False
    return int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1


def _end_of_iban(text: str, start: int, end: int) -> int | None:
    """Where the account number that begins at `start` ends; None if there is none."""
    length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
    if length is None:
        return None
    compact = ""
    for place in range(start, end):
        if text[place].isalnum():
            compact += text[place]
            if len(compact) == length:
                whole = not text[place + 1 : place + 2].isalnum() and is_iban(compact.upper())
                return place + 1 if whole else None
    return None
