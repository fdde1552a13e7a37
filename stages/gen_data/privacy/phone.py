"""Phone numbers, as people write them in many countries; what is valid is known to phonenumbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import phonenumbers
import regex

from stages.gen_data.privacy.context import MATCH_S, after, before, last_end, looks_like_maths, words
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, SURE, Form

REGIONS = (
    "US", "GB", "DE", "FR", "IN", "CN", "ES", "IT", "BR", "AU", "NL", "JP", "KR", "CH", "AT", "BE", "PL",
    "SE", "IE", "PT", "MX", "NZ", "ZA", "TR", "IL", "SG", "HK",
)  # fmt: skip
"""Countries whose way of writing numbers without a country code is known here, likely ones first."""

MORE_REGIONS = (
    "TH", "ID", "MY", "PH", "VN", "TW", "AE", "SA", "EG", "NG", "KE", "PK", "BD", "AR", "CO", "CL", "PE",
    "RU", "UA", "RO", "CZ", "HU", "GR", "DK", "NO", "FI",
)  # fmt: skip
"""Countries whose numbers count behind a word such as "phone" only."""

_NORTH_AMERICAN = regex.compile(
    r"(?<![0-9A-Za-z_@])(?:\+?1[\-. ]?)?(?:\((?P<paren>\d{3})\)[\-. ]?|(?P<area>\d{3})(?P<sign>[\-./ "
    r"]))(?P<exchange>\d{3})"
    r"(?P<second>[\-. ])(?P<line>\d{4})(?P<extension>,?\s?(?:x|ext\.?|extension)\s?\d{1,6})?",
    regex.IGNORECASE,
)
_INTERNATIONAL = regex.compile(
    r"(?<![0-9A-Za-z_@+])\(?(?:\+|00(?=[1-9]\d?[\d \-.(]))\s?\(?[1-9]\d{0,2}\)?(?:[ "
    r".\-/]?\(?\d{1,5}\)?){1,6}(?:[ .\-/]?\d{1,4}){0,2}"
)
_TRUNK = regex.compile(
    r"(?<![0-9A-Za-z_@])\(?0\d{1,4}\)?(?:[ \-/]|(?<=\)))\d{3,8}(?:[ \-]\d{2,5}){0,3}(?:-\d)?"
)
_PAIRS = regex.compile(r"(?<![0-9A-Za-z_@])0[1-9](?P<sign>[ .\-])\d\d(?:(?P=sign)\d\d){3}")
_BRAZILIAN = regex.compile(r"(?<![0-9A-Za-z_@])\(\d{2}\)\s?9?\d{4}-\d{4}")
_CHINESE_MOBILE = regex.compile(r"(?<![0-9A-Za-z_@])(?:86[\- ]?)?1[3-9]\d(?P<sign>[ \-]?)\d{4}(?P=sign)\d{4}")
_BARE = regex.compile(r"(?<![0-9A-Za-z_@])\(?\d{2,5}\)?(?:[ .\-]?\d{2,5}){1,5}")
_NO_NUMBER = regex.compile(r"\d+\.\d+|(?:19|20)\d\d[ \-](?:19|20)\d\d|\([1-9]\d{3,}\).*")  # decimals, years
_LOCAL = regex.compile(r"(?<![0-9A-Za-z_@])[2-9]\d{2}[\-. ]\d{4}")
_SPLIT = regex.compile(r"[ .\-/]")
_CHINESE = regex.compile(r"\p{Han}", regex.VERSION1)

_PHONE_WORDS = words(
    r"(?:phone|telephone|mobile|cell|contact|tel|whatsapp)[\s_\-]?(?:numbers?|no|num|nr)", "phones?",
    "telephones?", "tel", "tele", "fon", "cell", "mobile", "cellphone", "mob", "fax", "whatsapp", "sms",
    "hotline", "helpline", "landline", "voicemail", "ph", "imessage", "telegram", "wechat", "viber",
    "telefon", "telefonnummer", "handy", "handynummer", "rufnummer", "mobil", "t[eé]l[eé]phone",
    "t[eé]l", "tel[eé]fono", "m[oó]vil", "celular", "telefone", "telem[oó]vel",
    "telefono", "cellulare", "telefoonnummer", "telefoon", "mobiel", "telefon numaras\u0131",
    "\u0442\u0435\u043b\u0435\u0444\u043e\u043d\u0430?", "\u0442\u0435\u043b", "电话",
    "電話", "手机", "手機", "号码", "联系", "聯繫",
    "微信", "拨打", "携帯", "전화", "휴대폰",
    "연락처",
)  # fmt: skip
_CALL_WORDS = words(
    "call", "called", "calling", "dial", "dialed", "dialled", "ring", "text", "texted", "reach", "anrufen",
    "ruf", "appelez", "appeler", "portable", "ll[aá]mame", "llamar", "ligue", "chiama(?:mi)?", "bel",
    "\u0437\u0432\u043e\u043d\u0438\u0442\u0435",
)  # fmt: skip
NEAR = 25
"""How near a word that means other things too must be, in characters."""

_NOT_PHONE = words(
    "order", "orders", "invoice", "isbn", "issn", "tracking", "case", "ticket", "serial", "sku", "part",
    "model", "policy", "reference", "ref", "id", "ids", "code", "zip", "zipcode", "postcode", "date",
    "dates", "account", "batch", "lot", "patent", "doi", "version", "score", "scores", "timestamp",
    "coordinates", "cas", "订单", "编号", "身份证",
)  # fmt: skip
_SAID_BEHIND = regex.compile(
    r"\s*[(\[,]?\s*(?:is|was|are|on)?\s*(?:(?:my|his|her|our|their|your|the)\s)?\s*(?:(?:new|old|work|home|"
    r"office|direct)\s)?\s*"
    r"(?:phone|telephone|cell|mobile|fax|whatsapp|tel\b|是?我?的?(?:电话|電話|手机|手機|号码))",
    regex.IGNORECASE,
)
_ROUND = regex.compile(r"(?:\d*00)(?:\D+\d*00)+")
_BYTE_BEFORE, _BYTE_BEHIND = (
    regex.compile(r"\b[0-9A-Fa-f]{2} \Z"),
    regex.compile(r" [0-9A-Fa-f]{2}\b"),
)  # of a dump
_CONTINUES_BEFORE = regex.compile(r"(?:[0-9A-Za-z_$\\]|\d[.,*\^:]|[A-Za-z0-9]-|::|(?<!/)/)\Z")
_CONTINUES_BEHIND = regex.compile(r"[0-9A-Za-z_]|[.,/*\^:\-]\d")


class Phone(Form):
    """A number that could be dialled and is written as phone numbers are, or follows a word that says it is
    one."""

    entity = "PHONE_NUMBER"
    hint = regex.compile(r"\d(?:[ .\-/()]{0,3}\d){6}")

    def find(self, text: str) -> Iterator[Finding]:
        for match in _INTERNATIONAL.finditer(text, timeout=MATCH_S):
            yield from self._international(text, match.start(), match.end())
        for match in _NORTH_AMERICAN.finditer(text, timeout=MATCH_S):
            yield from self._north_american(text, match)
        for match in _CHINESE_MOBILE.finditer(text, timeout=MATCH_S):
            digits = _digits(match[0])[-11:]
            if _is_valid(digits, "CN") and len(digits.rstrip("0")) > 6:
                grouped = bool(match["sign"]) or match[0].startswith("86")
                near = before(text, match.start()) + after(text, match.end())
                sure = grouped or _CHINESE.search(near, timeout=MATCH_S) is not None
                yield from self._found(text, match.start(), match.end(), sure, "Chinese mobile")
        for pattern, regions in ((_TRUNK, REGIONS), (_BRAZILIAN, ("BR",))):
            for match in pattern.finditer(text, timeout=MATCH_S):
                digits = _digits(match[0])
                binary = set(digits) <= {"0", "1"}
                if (
                    9 <= len(digits) <= 12
                    and not binary
                    and any(_is_valid(digits, region) for region in regions)
                ):
                    counted = _is_counted(match[0])
                    yield from self._found(text, match.start(), match.end(), sure=not counted)
        for match in _PAIRS.finditer(text, timeout=MATCH_S):
            pairs = [int(pair) for pair in regex.findall(r"\d\d", match[0])]
            if _is_valid(match[0], "FR"):
                dump = match["sign"] == " " and (
                    _BYTE_BEFORE.search(text[max(0, match.start() - 4) : match.start()])
                    or _BYTE_BEHIND.match(text, match.end())
                )
                sure = not dump and (match["sign"] != " " or pairs != sorted(pairs))
                yield from self._found(text, match.start(), match.end(), sure)
        if _PHONE_WORDS.search(text, timeout=MATCH_S) or _CALL_WORDS.search(text, timeout=MATCH_S):
            yield from self._with_words(text)

    def _with_words(self, text: str) -> Iterator[Finding]:
        for match in _BARE.finditer(text, timeout=MATCH_S):
            start, end = match.span()
            digits = _digits(match[0])
            if _NO_NUMBER.fullmatch(match[0]):
                continue
            if 8 <= len(digits) <= 12 and _is_said(text, start, end) and _could_be_dialled(digits):
                yield from self._found(text, start, end, sure=False)
        for match in _LOCAL.finditer(text, timeout=MATCH_S):
            yield from self._found(text, match.start(), match.end(), sure=False)

    def _international(self, text: str, start: int, end: int) -> Iterator[Finding]:
        """The longest beginning of a stretch that is a valid number."""
        if text[start + 1 : end].isdigit() and text[max(0, start - 5) : start].rstrip()[-1:].isdigit():
            return  # 3 +441234567890
        while end > start:
            shown = text[start:end]
            digits = _digits(shown)
            if len(digits) < 8:
                return
            number = f"+{digits.removeprefix('00') if '+' not in shown else digits}"
            opened = shown.count("(") == shown.count(")") or shown.startswith("(")
            if opened and (_is_valid(number, None) or (digits[0] == "1" and len(digits) == 11)):
                surely = "+" in shown or len(_SPLIT.findall(shown)) >= 2
                yield from self._found(text, start, end, surely)
                return
            end = start + max(shown.rfind(sign) for sign in " .-/")

    def _north_american(self, text: str, match: regex.Match[str]) -> Iterator[Finding]:
        """Whatever the digits: people make numbers up that nobody has, such as 123-456-7890."""
        number = f"{match['area']} {match['exchange']} {match['line']}"
        separated = match["sign"] != " " and match["second"] != " "
        sure = match["paren"] is not None or (separated and not _ROUND.fullmatch(number))
        yield from self._found(text, match.start(), match.end(), sure)

    def _found(self, text: str, start: int, end: int, sure: bool, form: str = "") -> Iterator[Finding]:
        if text[start] == "(" and ")" not in text[start:end]:
            start += 1
        if _continues(text, start, end):
            return
        said = _is_said(text, start, end)
        if said:
            yield Finding(start, end, self.entity, SURE, form)
        elif sure and not _is_something_else(text, start):
            # No term of a calculation begins with a zero.
            if not text[start:end].lstrip("(").startswith("0") and looks_like_maths(text, start, end):
                return
            yield Finding(start, end, self.entity, LIKELY, form)


def _is_counted(number: str) -> bool:
    """Whether groups of the same length go up: 028 029 030 031."""
    groups = number.split(" ")
    return len(groups) > 2 and len({len(group) for group in groups}) == 1 and groups == sorted(groups)


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def _could_be_dialled(digits: str) -> bool:
    """Whether digits are a number somewhere, or the one that people type who make one up."""
    north_american = len(digits) == 10 and digits[0] in "23456789" and digits[3] in "23456789"
    return (
        north_american
        or digits == "1234567890"
        or any(_is_valid(digits, region) for region in (*REGIONS, *MORE_REGIONS))
    )


@lru_cache(maxsize=4096)
def _is_valid(number: str, region: str | None) -> bool:
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number, region))
    except phonenumbers.NumberParseException:
        return False


def _is_said(text: str, start: int, end: int) -> bool:
    """Whether the words around say that it is a phone number, and none nearer that it is something else."""
    ahead = before(text, start)
    if ahead.endswith("(") and ahead[-2:-1].isalnum():
        return False  # call f(1000000007)
    said = last_end(_PHONE_WORDS, ahead)
    near = before(text, start, NEAR)
    called = last_end(_CALL_WORDS, near)
    if called >= 0:
        said = max(said, len(ahead) - len(near) + called)
    if said >= 0:
        return said > last_end(_NOT_PHONE, ahead)
    return _SAID_BEHIND.match(after(text, end), timeout=MATCH_S) is not None and not _is_something_else(
        text, start
    )


def _is_something_else(text: str, start: int) -> bool:
    """Whether the words right before say that it is an order, an ISBN, a score."""
    return last_end(_NOT_PHONE, before(text, start, NEAR)) >= 0


def _continues(text: str, start: int, end: int) -> bool:
    """Whether the digits go on outside the match, which makes it a part of some longer number."""
    ahead, behind = text[max(0, start - 2) : start], text[end : end + 2]
    return bool(
        _CONTINUES_BEFORE.search(ahead, timeout=MATCH_S) or _CONTINUES_BEHIND.match(behind, timeout=MATCH_S)
    )
