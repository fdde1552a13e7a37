"""Secrets that show by their form: keys of providers, private keys, tokens, addresses with a password."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import regex

from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.credentials import is_made_up
from stages.gen_data.privacy.finding import SECRET, Finding
from stages.gen_data.privacy.form import SURE


@dataclass(frozen=True)
class Key:
    """One kind of secret.

    Attributes:
        name: what it is, for reports.
        marks: lower-case texts of which every text with such a secret has one.
        pattern: finds it; if it has a group named "secret", that is the secret.
        holds: a further check of what was found.
    """

    name: str
    marks: tuple[str, ...]
    pattern: regex.Pattern[str]
    holds: Callable[[regex.Match[str]], bool] = lambda match: True


def find_keys(text: str) -> Iterator[Finding]:
    """Every secret that shows by its form, in a text in normal form.

    Raises:
        TimeoutError: an expression searches longer than allowed.
    """
    lowered = text.lower()
    for key in KEYS:
        if not any(mark in lowered for mark in key.marks):
            continue
        for match in key.pattern.finditer(text, timeout=MATCH_S):
            if key.holds(match):
                group = "secret" if "secret" in match.groupdict() else 0
                yield Finding(match.start(group), match.end(group), SECRET, SURE, key.name)


def may_have_keys(lowered: str) -> bool:
    """False if a lower-cased text has no secret of these kinds for certain."""
    return any(mark in lowered for mark in _MARKS)


def _key(
    name: str, marks: str, expression: str, holds: Callable[[regex.Match[str]], bool] | None = None
) -> Key:
    """A key whose expression stands alone: no letter, digit or underscore on either side."""
    pattern = regex.compile(rf"(?<![A-Za-z0-9_])(?:{expression})(?![A-Za-z0-9_])")
    return Key(name, tuple(marks.split()), pattern, holds or (lambda match: True))


def _is_mixed(match: regex.Match[str]) -> bool:
    """Digits and letters: not the name of a variable or of a style sheet's class."""
    return any(c.isdigit() for c in match[0][3:]) and any(c.isalpha() for c in match[0][3:])


def _is_web_token(match: regex.Match[str]) -> bool:
    """Whether the first part says which algorithm signs the rest (RFC 7519)."""
    head = match[0].partition(".")[0]
    try:
        header = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (ValueError, binascii.Error):
        return False
    return isinstance(header, dict) and "alg" in header


def _has_password(match: regex.Match[str]) -> bool:
    user, password = match["user"], match["secret"]
    local = match["host"].startswith(("localhost", "127.0.0.1"))
    return not is_made_up(password) and not (local and password == user)


KEYS = (
    _key("AWS access key", "akia asia abia acca", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}"),
    Key(
        "AWS secret key",
        ("aws", "secret", "akia", "asia"),
        regex.compile(
            r"(?:(?:aws|secret|SecretAccessKey)[\w\- "
            r".]{0,30}[\"']?\s{0,3}(?:=>|[:=]|is)\s{0,3}|(?:AKIA|ASIA)[A-Z2-7]{16}[\s:,;/|\"']{1,4})"
            r"[\"']?(?P<secret>(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))",
            regex.IGNORECASE,
        ),
        lambda match: any(c.isdigit() for c in match["secret"]) and any(c.isupper() for c in match["secret"]),
    ),
    _key(
        "GitHub token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{36,255}",
    ),
    _key(
        "GitLab token",
        "glpat- gldt- glrt- glcbt- glptt- glft- glimt- glagent- gloas- glsoat- glffct- gr1348941",
        r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w\-]{20,}(?:\.[\w.\-]{9,})?|GR1348941[\w\-]{20}",
    ),
    _key("Anthropic key", "sk-ant-", r"sk-ant-[a-z]{2,10}\d\d-[\w\-]{20,}"),
    _key(
        "OpenAI key",
        "sk-",
        r"sk-(?:proj|svcacct|admin|None)-[\w\-]{20,}|sk-(?:or-v1-)?[A-Za-z0-9]{32,}",
        _is_mixed,
    ),
    _key("Hugging Face token", "hf_ api_org_", r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}"),
    _key("Google key", "aiza ya29. gocspx-", r"AIza[\w\-]{35}|ya29\.[\w\-]{20,}|GOCSPX-[\w\-]{28}"),
    _key(
        "Slack token",
        "xox xapp- hooks.slack.com",
        r"xox[abceoprs](?:\.xox[a-z])?-(?:\d-)?[\w\-]{10,}|xapp-\d-[\w\-]{10,}|hooks\.slack\.com/(?:services|workflows)/[\w/]{20,}",
        _is_mixed,
    ),
    _key(
        "Stripe key",
        "sk_live_ sk_test_ rk_live_ rk_test_ whsec_",
        r"[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{24,}",
    ),
    _key("npm token", "npm_", r"npm_[A-Za-z0-9]{36}"),
    _key("PyPI token", "pypi-", r"pypi-AgE[\w\-]{50,}"),
    _key("SendGrid key", "sg.", r"SG\.[\w\-]{16,32}\.[\w\-]{16,64}"),
    _key("Twilio key", "sk", r"SK[0-9a-f]{32}"),
    _key("DigitalOcean token", "dop_v1_ doo_v1_ dor_v1_", r"do[por]_v1_[0-9a-f]{64}"),
    _key("Shopify token", "shp", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    _key("Telegram token", ":aa", r"\d{8,10}:AA[\w\-]{32,34}"),
    _key(
        "Discord token", "discord bot token", r"[MNO][A-Za-z\d]{23,27}\.[\w\-]{6}\.[\w\-]{27,38}", _is_mixed
    ),
    _key("Groq key", "gsk_", r"gsk_[A-Za-z0-9]{40,}"),
    _key("xAI key", "xai-", r"xai-[A-Za-z0-9]{60,}"),
    _key("Replicate token", "r8_", r"r8_[A-Za-z0-9]{37}"),
    _key("Perplexity key", "pplx-", r"pplx-[A-Za-z0-9]{40,}"),
    _key("Databricks token", "dapi", r"dapi[0-9a-f]{32}(?:-\d)?"),
    _key("Vault token", "hvs. hvb.", r"hv[sb]\.[\w\-]{24,}"),
    _key("Notion token", "ntn_ secret_", r"ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43}"),
    _key("Linear key", "lin_api_", r"lin_api_[A-Za-z0-9]{40}"),
    _key("Postman key", "pmak-", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}"),
    _key("age key", "age-secret-key-1", r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    _key("extended private key of a wallet", "prv", r"[xyz]prv[A-HJ-NP-Za-km-z1-9]{100,112}"),
    Key(
        "Azure storage key",
        ("accountkey", "sharedaccesskey"),
        regex.compile(
            r"(?:AccountKey|SharedAccessKey)=(?P<secret>[A-Za-z0-9+/]{40,}={0,2})", regex.IGNORECASE
        ),
    ),
    Key(
        "private key",
        ("private key",),
        # With a body, so that a question about the header is none; without an end, when it was cut off.
        regex.compile(
            r"-{4,5}\s?BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: "
            r"BLOCK)?\s?-{4,5}(?=[^A-Za-z0-9+/]*(?:[A-Za-z\-]+: [^\n]*|\\[nr]|\s){0,12}"
            r"[A-Za-z0-9+/=]{16})[^\-]*(?:-(?!----)[^\-]*)*+(?:-{4,5}\s?END [A-Z0-9 ]{0,40}-{4,5})?"
        ),
    ),
    Key(
        "web token",
        ("eyj",),
        regex.compile(r"(?<![\w\-])eyJ[\w\-]{8,}\.[\w\-]{2,}\.[\w\-]*(?:\.[\w\-]+\.[\w\-]+)?"),
        _is_web_token,
    ),
    Key(
        "address with a password",
        ("://",),
        regex.compile(
            r"(?<![A-Za-z0-9])[a-z][a-z0-9+.\-]{1,20}://(?P<user>[^\s/:@\"'<>]{0,64}):(?P<secret>[^\s/@\"'<>]{3,100})@(?P<host>[\w.\-\[]{1,100})",
            regex.IGNORECASE,
        ),
        _has_password,
    ),
    Key(
        "authorization header",
        ("authorization", "bearer", "x-api-key"),
        regex.compile(
            r"(?:authorization[\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:bearer|basic|token)\s+|\bbearer\s+|"
            r"x-api-key[\"']?\s{0,2}[:=]\s{0,2}[\"']?)"
            r"(?P<secret>[\w.~+/\-]{16,}={0,2})",
            regex.IGNORECASE,
        ),
        lambda match: (
            _is_mixed(match) and not is_made_up(match["secret"]) and any(c.isdigit() for c in match["secret"])
        ),
    ),
    Key(
        "password on a command line",
        ("curl", "wget", "mysql", "sshpass", "psql"),
        regex.compile(
            r"(?:curl\s[^\n]{0,200}?(?:-u|--user)[\s=]+[\"']?[\w.@\-]{1,64}:|sshpass\s+-p\s*[\"']?|"
            r"mysql(?:dump)?\s[^\n]{0,100}?-p(?=\S))"
            r"(?P<secret>[^\s\"'$<{]{4,100})",
            regex.IGNORECASE,
        ),
        lambda match: not is_made_up(match["secret"]) and not match["secret"].isalpha(),
    ),
)
_MARKS = tuple(sorted({mark for key in KEYS for mark in key.marks}))
