"""Secrets of every kind, as one recognizer."""

from __future__ import annotations

from collections.abc import Iterator

from stages.gen_data.privacy.credentials import find_credentials, may_have_credentials
from stages.gen_data.privacy.finding import SECRET, Finding
from stages.gen_data.privacy.form import Form
from stages.gen_data.privacy.keys import find_keys, may_have_keys


class Secret(Form):
    """Keys, tokens and passwords."""

    entity = SECRET

    def may_find(self, text: str) -> bool:
        lowered = text.lower()
        return may_have_keys(lowered) or may_have_credentials(lowered)

    def find(self, text: str) -> Iterator[Finding]:
        yield from find_keys(text)
        if may_have_credentials(text.lower()):
            yield from find_credentials(text)
