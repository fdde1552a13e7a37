"""E-mail addresses, written out and obfuscated."""

from __future__ import annotations

from collections.abc import Iterator

import regex

from stages.gen_data.privacy.context import MATCH_S, before, words
from stages.gen_data.privacy.domains import COMMON, could_have_mail
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, SURE, Form

# Letters of scripts that put spaces between words: in others a sentence goes on right before and behind an
# address.
_W = r"[\w--[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"
_LABEL = rf"{_W}(?:[{_W}\-]{{0,61}}{_W})?"
_FLAGS = regex.IGNORECASE | regex.VERSION1

# An address is looked for from its sign to both sides: a pattern that begins with the name tries every start
# of a long text with every length.
_SIGN = regex.compile(r"@|%40|&\#64;")
_LOCAL = regex.compile(rf"{_W}[{_W}.+'\-]{{0,63}}\Z", _FLAGS)
_DOMAIN = regex.compile(rf"(?:{_LABEL}\.){{1,8}}{_LABEL}", _FLAGS)
_LONGEST_LOCAL = 64

_OPEN, _CLOSE = r"[\[({<]\s?", r"\s?[\])}>]"
_DOT = rf"(?:\s?{_OPEN}(?:dot|punkt|punto|point|\.){_CLOSE}\s?|\s?\.\s?|\s+dot\s+|_dot_)"
_SPELLED_SIGN = regex.compile(
    rf"\s?(?P<bracket>{_OPEN}(?:at|@|\u00e4t|a\s?t|arroba){_CLOSE})\s?|(?P<sign>\s@\s)|(?P<word>\s{{1,3}}at\s{{1,3}}|_at_)",
    _FLAGS,
)
_SPELLED_LOCAL = regex.compile(
    rf"(?<![\w.@])[\w+\-]{{1,40}}(?:(?:\.|{_DOT}|\s(?:underscore|dash|hyphen)\s)[\w+\-]{{1,40}}){{0,3}}\Z",
    _FLAGS,
)
_SPELLED_DOMAIN = regex.compile(rf"[\w\-]{{1,40}}?(?:{_DOT}[\w\-]{{1,40}}?){{1,4}}(?![\w@])", _FLAGS)
_ANY_DOT = regex.compile(_DOT, _FLAGS)
_WITHOUT_DOT = regex.compile(rf"{_DOT}\Z", _FLAGS)
_MAIL_WORDS = words(
    "e-?mails?", "mail", "mailto", "contact", "reach", "write to", "address", "correo", "courriel", "posta",
    "adresse", "邮箱", "邮件", "電子郵件", "メール", "이메일", "почта",
)  # fmt: skip
_ORDINARY = words(
    "a", "about", "all", "also", "am", "and", "are", "as", "available", "be", "bought", "buy", "check",
    "find", "found", "get", "go", "he", "here", "hosted", "i", "is", "it", "item", "items", "listed",
    "live", "located", "look", "meet", "me", "now", "offered", "on", "online", "order", "out", "page",
    "please", "post", "posted", "product", "read", "see", "she", "shop", "sign", "site", "sold", "start",
    "store", "that", "them", "there", "they", "this", "to", "up", "us", "visit", "was", "we", "website",
    "were", "work", "works", "you",
)  # fmt: skip


_USER_OF_URL = regex.compile(r"[a-z][a-z0-9+.\-]*://[^\s/@]*\Z", regex.IGNORECASE)


class Email(Form):
    """An address whose domain ends in a public suffix, and that is not a matrix product or a decorator."""

    entity = "EMAIL_ADDRESS"
    hint = regex.compile(r"@|%40|&\#64;|[\[({<_]\s?(?:at|a\s?t|ät|arroba)\s?[\])}>_]|\sat\s.*\sdot\s", _FLAGS)

    def find(self, text: str) -> Iterator[Finding]:
        for sign in _SIGN.finditer(text, timeout=MATCH_S):
            local = _LOCAL.search(text[max(0, sign.start() - _LONGEST_LOCAL) : sign.start()], timeout=MATCH_S)
            domain = _DOMAIN.match(text, sign.end(), timeout=MATCH_S)
            if local is None or domain is None:
                continue
            start, end = sign.start() - len(local[0]), _end_of_domain(domain[0])
            if end and not _is_code(text, start, local[0], domain[0][:end], sign.end() + end):
                yield Finding(start, sign.end() + end, self.entity, SURE)
        for sign in _SPELLED_SIGN.finditer(text, timeout=MATCH_S):
            ahead = text[max(0, sign.start() - _LONGEST_LOCAL - 1) : sign.start()]
            local = _SPELLED_LOCAL.search(ahead, timeout=MATCH_S)
            domain = _SPELLED_DOMAIN.match(text, sign.end(), timeout=MATCH_S)
            if local is None or domain is None:
                continue
            start, shown = sign.start() - len(local[0]), domain[0]
            plain = _ANY_DOT.sub(".", shown, timeout=MATCH_S)
            if not could_have_mail(plain) and plain.count(".") > 1:  # "jane [at] x.com. Then ..."
                plain, cut = plain.rsplit(".", 1)
                shown = _WITHOUT_DOT.sub("", shown[: len(shown) - len(cut)], timeout=MATCH_S)
            end = sign.end() + len(shown)
            if could_have_mail(plain) and _is_meant(text, start, end, local[0], sign, shown):
                yield Finding(start, end, self.entity, LIKELY, "obfuscated")


def _end_of_domain(shown: str) -> int:
    """How much of a match is the domain: without "Then" of "x.com.Then"; 0 if there is none."""
    labels = shown.split(".")
    if could_have_mail(shown):
        return len(shown)
    for count in range(len(labels) - 1, 1, -1):
        begins_a_sentence = labels[count][:1].isupper() and labels[count - 1].islower()
        if (labels[count - 1].lower() in COMMON or begins_a_sentence) and could_have_mail(
            ".".join(labels[:count])
        ):
            return len(".".join(labels[:count]))
    return 0


def _is_code(text: str, start: int, local: str, domain: str, end: int) -> bool:
    """Whether `local@domain` is rather a product of matrices, `x@w.to(device)`, or a repository,
    `git@host:name`."""
    suffix = domain.rpartition(".")[2]
    behind = text[end : end + 1]
    if local == "git" and behind in (":", "/"):
        return True
    if _USER_OF_URL.search(text[max(0, start - 100) : start], timeout=MATCH_S):
        return True
    if suffix.lower() in COMMON:
        return False
    if behind in ("(", "[", "=") or (suffix[0].islower() and not suffix.islower()):
        return True
    short = len(local) <= 2 and len(domain.partition(".")[0]) <= 2
    return short and not _MAIL_WORDS.search(before(text, start), timeout=MATCH_S)


def _is_meant(text: str, start: int, end: int, local: str, sign: regex.Match[str], domain: str) -> bool:
    """Whether what is spelled like an address is one, rather than `look at example dot com` or `A @ B.T`."""
    if sign["bracket"] or "_" in (sign["word"] or ""):
        return True
    said = _MAIL_WORDS.search(before(text, start), timeout=MATCH_S) is not None
    if sign["sign"]:  # also how matrices are multiplied
        code = text[end : end + 1] in ("(", "[") or len(local) < 3
        return (said or domain.rpartition(".")[2].lower() in COMMON) and not code
    if "dot" not in domain.lower():  # "look at example.com"
        return False
    return _ORDINARY.fullmatch(local) is None and (
        said or not local.isalpha() or sign["word"].strip().isupper()
    )
