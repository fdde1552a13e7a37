"""Addresses of web pages."""

from __future__ import annotations

from collections.abc import Iterator

import regex

from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.domains import could_exist
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, SURE, Form

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_WITH_SCHEME = regex.compile(r"(?<!\w)(?:https?|ftp|wss?)://[^\s<>\"'`]{3,2000}", regex.IGNORECASE)
_BARE = regex.compile(
    rf"(?<![\w@./\-])(?:{_LABEL}\.){{1,6}}[A-Za-z]{{2,24}}(?:/[^\s<>\"'`]{{0,2000}})?(?![\w(\[]|\.\w)"
)
_BARE_SUFFIXES = frozenset((
    "com", "org", "net", "edu", "gov", "mil", "info", "biz", "io", "ai", "app", "dev", "co", "uk", "de", "fr",
    "es", "eu", "nl", "jp", "cn", "ru", "br", "ca", "au", "ch", "us",
))  # fmt: skip


class Url(Form):
    """With a scheme or `www.`, or a common suffix in lower case: no `np.li`, `file.py`, `System.Net`."""

    entity = "URL"
    hint = regex.compile(r"://|\w\.[a-z]{2}", regex.IGNORECASE)

    def find(self, text: str) -> Iterator[Finding]:
        for match in _WITH_SCHEME.finditer(text, timeout=MATCH_S):
            yield Finding(match.start(), match.start() + len(_without_stop(match[0])), self.entity, SURE)
        for match in _BARE.finditer(text, timeout=MATCH_S):
            host, _, path = match[0].partition("/")
            suffix = host.rpartition(".")[2]
            likely = host.startswith("www.") or path or (host.islower() and suffix in _BARE_SUFFIXES)
            if likely and could_exist(host):
                yield Finding(
                    match.start(), match.start() + len(_without_stop(match[0])), self.entity, LIKELY
                )


def _without_stop(url: str) -> str:
    """Without the punctuation of the sentence that the address ends."""
    url = url.rstrip(".,;:!?'*_")
    return url[:-1].rstrip(".,;:!?") if url.endswith(")") and "(" not in url else url
