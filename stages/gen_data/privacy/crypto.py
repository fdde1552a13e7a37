"""Wallets: addresses of Bitcoin and Ethereum."""

from __future__ import annotations

from collections.abc import Iterator

import regex
from presidio_analyzer.predefined_recognizers import CryptoRecognizer

from stages.gen_data.privacy.context import MATCH_S
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, SURE, Form

_BITCOIN = regex.compile(
    r"(?<![A-Za-z0-9])(?:bc1[a-z0-9]{25,59}|BC1[A-Z0-9]{25,59}|"
    r"[13][A-HJ-NP-Za-km-z1-9]{25,34})(?![A-Za-z0-9])"
)
_ETHEREUM = regex.compile(r"(?<![A-Za-z0-9])0x[0-9a-fA-F]{40}(?![A-Za-z0-9])")


class Wallet(Form):
    """A Bitcoin address whose checksum is right, or an Ethereum address that is nobody's by convention."""

    entity = "CRYPTO"
    hint = regex.compile(r"(?:bc1|[13]|0x)[A-Za-z0-9]{25}", regex.IGNORECASE)

    def __init__(self, language: str) -> None:
        super().__init__(language)
        self._checksum = CryptoRecognizer(supported_language=language)

    def find(self, text: str) -> Iterator[Finding]:
        for match in _BITCOIN.finditer(text, timeout=MATCH_S):
            if self._checksum.validate_result(match[0].lower() if match[0][:2] in ("bc", "BC") else match[0]):
                yield Finding(match.start(), match.end(), self.entity, SURE, "Bitcoin")
        for match in _ETHEREUM.finditer(text, timeout=MATCH_S):
            if len(set(match[0][2:].lower())) > 4:  # not 0x000...dead and other addresses that burn
                yield Finding(match.start(), match.end(), self.entity, LIKELY, "Ethereum")
