"""Passwords and keys that only show by what stands before them: `password: ...`, `api_key = "..."`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import regex

from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.finding import SECRET, Finding
from stages.gen_data.privacy.form import LIKELY

_PASSWORD_NAMES = (
    "passwords?", "passwd", "passcode", "passphrase", "pass", "pwd", "pw", "passwort", "kennwort",
    "contraseña", "clave", "senha", "wachtwoord", "mot de passe", "parola", "hasło",
    "lösenord", "\u0430\u0434\u043c\u0438\u043d \u043f\u0430\u0440\u043e\u043b\u044c",
    "\u043f\u0430\u0440\u043e\u043b\u044c", "密码", "密碼", "口令",
    "パスワード", "비밀번호",
)  # fmt: skip
_S = r"[_\- ]?"
_KEY_NAMES = (
    f"api{_S}keys?", f"api{_S}secret", f"secret{_S}access{_S}key", f"secret{_S}keys?", f"access{_S}keys?",
    f"access{_S}token", f"auth{_S}token", f"api{_S}token", f"client{_S}secret", f"app{_S}secret",
    f"private{_S}key", f"refresh{_S}token", f"session{_S}token", f"bearer{_S}token",
    f"signing{_S}(?:key|secret)", f"encryption{_S}key", f"webhook{_S}secret", f"account{_S}key",
    f"jwt{_S}secret", "authtoken", "token", "secret", "credentials?",
)  # fmt: skip
MIN_JOINED = 7
"""Names longer than this are also found as the end of another word."""

_BARE = r"[^\s\"'`,;<>(){}\[\]]{1,200}"
_VALUE = rf"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\n]{{1,200}})(?P=quote)|(?P<bare>{_BARE}))"


def _assignment(names: tuple[str, ...]) -> regex.Pattern[str]:
    """`name = value` in the ways of many languages, `"name": "value"`, `--name value`, `name is value`.

    Long names may be the end of a longer one: `rapidApiKey`.
    """
    name = "|".join(sorted(names, key=len, reverse=True))
    joined = "|".join(each for each in names if len(each) > MIN_JOINED)
    return regex.compile(
        rf"(?P<name>(?:{joined})|(?<![^\W_])(?:{name}))\d?(?:[\"'`]?\]?[^\S\n]{{0,3}}(?:=>|:=|={{1,3}}|"
        rf":)[^\S\n]{{0,3}}(?:[brfu](?=[\"']))?"
        rf"|(?<=--(?:{name}))\s+|\s+(?:is|was|lautet|es|est|\u00e8)\s*:?\s+|['\u2019]s\s+|\s+(?=[\"'])|"
        rf"(?<=[\u4e00-\u9fff\u30c9\ud638])\s?(?:\u662f|\u4e3a|\u306f|\ub294)\s?"
        rf"|>(?=[^<\n]{{4,100}}</)){_VALUE}",
        regex.IGNORECASE,
    )


_DEFINITION = regex.compile(
    r"\bdefine\s*\(?\s*[\"']?(?P<name>\w{0,40}(?:PASSWORD|PASSWD|PWD|SECRET|_KEY|TOKEN|_SALT))[\"']?\s*,?\s*"
    r"(?P<quote>[\"'])(?P<quoted>[^\"'\n]{1,200})(?P=quote)(?P<bare>)",
    regex.IGNORECASE,
)
_PASSWORD = _assignment(_PASSWORD_NAMES)
_KEY = _assignment(_KEY_NAMES)
_STEMS = (
    "pass", "pw", "key", "secret", "token", "credential", "kennwort", "contrase\u00f1a", "clave", "senha",
    "wachtwoord", "parola", "has\u0142o", "l\u00f6senord", "\u043f\u0430\u0440\u043e\u043b\u044c", "密码",
    "密碼", "口令", "パスワード", "비밀번호",
)  # fmt: skip
"""Of which every name above has one."""

# What a value is not: a call, a variable, a template, a rule for passwords.
_EXPRESSION = regex.compile(
    r"[A-Za-z_$][\w$]*(?:(?:\.|::|->|\?\.)[A-Za-z_]\w*)+[;,]?|[$%&/\\*~|.\-+].*|\w+\\n.*"
)
_TEMPLATE = regex.compile(r"[$%#]?[{<\[(].*|\$\w+|%\w+%|\*+|.*(?:\.{3}|\u2026).*|.*\$\{.*|.*\{\{.*")
_RULE = regex.compile(
    r"(?:.*\|)?(?:min|max|required|nullable|confirmed|optional|between|size|regex|length|string|str|varchar|"
    r"char|text)\b[\d:|=_\-].*"
    r"|\d+[\-+][a-z]+(?:[\-+].*)?|[a-z]+/[a-z/]+|\d+(?:st|nd|rd|th|px|ms|kb|mb|gb|%)",
    regex.IGNORECASE,
)
_BEFORE_STAND_IN = (
    "your|my|the|new|old|current|some|enter|insert|example|sample|dummy|fake|foo|bar|replace|change|redacted|"
    "hidden|db|user|secure|strong|super|very|actual|real|plain|hashed|encrypted|default|this|here|a"
)
_STAND_INS = (
    "me|it|is|here|your|my|secret|strong|passwords?|passwd|pass|pwd|pw|token|key|api[_\\- ]?key|value|string|"
    "str|text|test|example|placeholder|none|null|nil|true|false|undefined|required|optional|unknown|admin|root|user|"
    "username|postgres|guest|login|credential"
)
_STAND_IN = regex.compile(
    rf"(?:(?:{_BEFORE_STAND_IN})[_\- ]*)*(?:{_STAND_INS})"
    r"(?:[_\- ]*(?:here|value|string|goes|hash))*(?:[_\-]\d{1,4})?",
    regex.IGNORECASE,
)
_VARIABLE = regex.compile(rf"[@#!]?{_STAND_IN.pattern}\d?", regex.IGNORECASE)  # password2, but not secret123
_SAME = regex.compile(r"(.)\1*|[xX*#.\-_\u2022]+")
_KEY_CHARACTERS = regex.compile(r"[\w+/=.~\-:|]+")
MIN_PASSWORD, MIN_KEY = 6, 12
_MIN_ENTROPY = 2.8


def may_have_credentials(lowered: str) -> bool:
    """False if a lower-cased text names no password or key."""
    return any(stem in lowered for stem in _STEMS)


def find_credentials(text: str) -> Iterator[Finding]:
    """Every password and key that its name tells, in a text in normal form.

    Raises:
        TimeoutError: an expression searches longer than allowed.
    """
    for pattern, holds, form in (
        (_PASSWORD, _is_password, "password"),
        (_KEY, _is_key, "key"),
        (_DEFINITION, _is_password, "password"),
    ):
        for match in pattern.finditer(text, timeout=MATCH_S):
            quoted = match["quote"] is not None
            group = "quoted" if quoted else "bare"
            value = match[group] if quoted else match[group].rstrip(".,:;?")
            called = text[match.end() : match.end() + 1] in ("(", "[", "{") and not quoted
            if not called and holds(value, quoted):
                start = match.start(group)
                yield Finding(start, start + len(value), SECRET, LIKELY, form)


def is_made_up(value: str) -> bool:
    """Whether a value stands in for a password: `your_password`, `<password>`, `${PASS}`, `******`."""
    return bool(_TEMPLATE.fullmatch(value) or _STAND_IN.fullmatch(value) or _SAME.fullmatch(value))


def _is_password(value: str, quoted: bool) -> bool:
    if len(value) < MIN_PASSWORD or is_made_up(value) or _RULE.fullmatch(value):
        return False
    if not quoted and (_EXPRESSION.fullmatch(value) or _VARIABLE.fullmatch(value)):
        return False
    if any(c.isspace() for c in value):
        return False
    if value.isdigit():
        return True
    words = value.replace("_", "").replace("-", "").strip("!?.@#")
    if words.isalpha():  # a word, a name, or CamelCase
        return False
    return any(c.isalpha() for c in value) and value.isprintable() and not _is_prose(value)


def _is_prose(value: str) -> bool:
    """Words with punctuation between: `letters/digits`, `don't`, `name@host`."""
    return regex.fullmatch(
        r"[A-Za-z]+(?:[/'&.,:@+=|][A-Za-z]+)+[!.?]*", value
    ) is not None and not regex.search(r"[a-z][A-Z]|\d", value)


def _is_key(value: str, quoted: bool) -> bool:
    if len(value) < MIN_KEY or is_made_up(value) or _RULE.fullmatch(value) or any(c.isspace() for c in value):
        return False
    if not quoted and _EXPRESSION.fullmatch(value):
        return False
    if "://" in value or not value.isprintable() or not (quoted or _KEY_CHARACTERS.fullmatch(value)):
        return False
    digits = sum(c.isdigit() for c in value)
    letters = sum(c.isalpha() for c in value)
    return digits >= 2 and letters >= 2 and _entropy(value) >= _MIN_ENTROPY


def _entropy(text: str) -> float:
    """Bits a character, from how often each occurs."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
