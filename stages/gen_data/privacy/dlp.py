"""The search by Google's Sensitive Data Protection, over its HTTP API.

What the service knows no type for, secrets and wallets first of all, is searched for on this machine before
anything is sent, and a text in which that finds something whose row is dropped anyway is never sent at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.errors import EagleError
from stages.gen_data.privacy.detector import ERROR, TOO_LONG, Scan, Unscannable
from stages.gen_data.privacy.finding import Finding, resolve
from stages.gen_data.privacy.normal import NormalText, normalise
from stages.gen_data.privacy.rules import Allowed, Search

if TYPE_CHECKING:
    from google.cloud.dlp_v2 import DlpServiceClient

INFO_TYPES: dict[str, tuple[str, ...]] = {
    "EMAIL_ADDRESS": ("EMAIL_ADDRESS",),
    "PHONE_NUMBER": ("PHONE_NUMBER",),
    "CREDIT_CARD": ("CREDIT_CARD_NUMBER",),
    "IBAN_CODE": ("IBAN_CODE",),
    "US_SSN": ("US_SOCIAL_SECURITY_NUMBER",),
    "IP_ADDRESS": ("IP_ADDRESS",),
    "PERSON": ("PERSON_NAME",),
    "LOCATION": ("LOCATION", "STREET_ADDRESS"),
    "ORGANIZATION": ("ORGANIZATION_NAME",),
    "DATE_TIME": ("DATE", "TIME"),
    "URL": ("URL",),
    "MAC_ADDRESS": ("MAC_ADDRESS",),
    "US_PASSPORT": ("US_PASSPORT",),
    "US_DRIVER_LICENSE": ("US_DRIVERS_LICENSE_NUMBER",),
    "UK_NHS": ("UK_NATIONAL_HEALTH_SERVICE_NUMBER",),
}
"""Google's names for what an entity stands for."""

LIKELIHOODS = {"VERY_UNLIKELY": 0.1, "UNLIKELY": 0.3, "POSSIBLE": 0.5, "LIKELY": 0.75, "VERY_LIKELY": 1.0}
"""The scores that Google's likelihoods count as."""

MAX_REQUEST_BYTES = 400_000
"""Bytes of texts in a request, as JSON writes them; the service takes half a megabyte in all."""

MAX_REQUEST_TEXTS = 1_000
MAX_FINDINGS = 3_000
"""The most findings that the service gives for one request."""

_REQUEST_S = 60.0
_PROBE = "Is everything as it should be?"
_LOGIN = (
    "log in with `gcloud auth application-default login` or set GOOGLE_APPLICATION_CREDENTIALS, enable "
    "the API dlp.googleapis.com, and name the project under dlp in --pii-config"
)


class DlpDetector:
    """Searches many texts in one request: each is a row of a table. May be used by several threads."""

    def __init__(self, search: Search) -> None:
        """Asks the service once, with a text of our own, so that wrong settings show at once.

        Raises:
            EagleError: the package or credentials are missing, or the service refuses or is out of reach.
        """
        try:
            import google.cloud.dlp_v2  # noqa: F401
        except ImportError:
            raise EagleError(
                "--pii-engine dlp needs google-cloud-dlp: pip install 'eagle-decoding[dlp]'"
            ) from None
        from stages.gen_data.privacy.analyzer import PresidioDetector
        from stages.gen_data.privacy.ip import is_public

        self._search, self._is_public, self._allowed = search, is_public, Allowed(search.rules)
        types = INFO_TYPES | search.rules.dlp.info_types
        own = {recognizer.supported_entity for recognizer in search.rules.recognizers}
        remote = [entity for entity in search.entities if entity in types and entity not in own]
        if not remote:
            raise EagleError(
                f"--pii-engine dlp has no info type for {', '.join(search.entities)}: use --pii-engine "
                "presidio, or name them under dlp: info_types in --pii-config"
            )
        local = tuple(entity for entity in search.entities if entity not in remote)
        self._local = PresidioDetector(replace(search, entities=local)) if local else None
        self._entities = {info_type: entity for entity in remote for info_type in types[entity]}
        self._least = min(map(search.threshold_of, remote))
        self._inspect_config = {
            "info_types": [{"name": name} for name in self._entities],
            "min_likelihood": next(name for name, score in LIKELIHOODS.items() if score >= self._least),
            "limits": {"max_findings_per_request": MAX_FINDINGS},
            "include_quote": False,
        }
        self._client, self._parent = _connect(search)
        self._ask([_PROBE])

    def scan(self, texts: Sequence[str]) -> list[Scan]:
        scans: list[Scan] = self._local.scan(texts) if self._local else [[] for _ in texts]
        normals: dict[int, NormalText] = {}
        for number, (text, scan) in enumerate(zip(texts, scans, strict=True)):
            if isinstance(scan, Unscannable) or not text.strip() or self._is_dropped(scan):
                continue
            normal = normalise(text)
            if len(text) > self._search.rules.max_chars or _size(normal.text) > MAX_REQUEST_BYTES:
                scans[number] = Unscannable(TOO_LONG)
            else:
                normals[number] = normal
        for numbers in _requests({number: normal.text for number, normal in normals.items()}):
            found = self._inspect([normals[number].text for number in numbers])
            for number, remote in zip(numbers, found, strict=True):
                local = scans[number]
                assert not isinstance(local, Unscannable)
                scans[number] = self._joined(texts[number], normals[number], local, remote)
        return scans

    def _is_dropped(self, findings: list[Finding]) -> bool:
        return any(finding.entity in self._search.rules.drop for finding in findings)

    def _joined(self, text: str, normal: NormalText, local: list[Finding], remote: Scan) -> Scan:
        """What both searches found in one text, at its places in the text as it was."""
        if isinstance(remote, Unscannable):
            return remote
        both = list(local)
        for finding in remote:
            if not 0 <= finding.start < finding.end <= len(normal.text):
                return Unscannable(ERROR, "FindingOutOfText")
            start, end = normal.original(finding.start, finding.end)
            ours = finding.entity != "IP_ADDRESS" or self._is_public(normal.text[finding.start : finding.end])
            sure = finding.score >= self._search.threshold_of(finding.entity)
            if ours and sure and not self._allowed.has(text[start:end]):
                both.append(replace(finding, start=start, end=end))
        return resolve(both, frozenset(self._search.rules.drop))

    def _inspect(self, texts: list[str]) -> list[Scan]:
        """One result a text, with places in the text as it was sent."""
        try:
            result = self._ask(texts)
        except EagleError:
            raise
        except Exception as error:
            # Something in one of the texts, which the message may quote.
            return self._halves(texts) if len(texts) > 1 else [Unscannable(ERROR, type(error).__name__)]
        if result.findings_truncated or len(result.findings) >= MAX_FINDINGS:
            return self._halves(texts) if len(texts) > 1 else [Unscannable(ERROR, "TooManyFindings")]
        found: list[list[Finding]] = [[] for _ in texts]
        for each in result.findings:
            places = each.location.content_locations
            span = each.location.codepoint_range
            entity = self._entities.get(each.info_type.name)
            row = places[0].record_location.table_location.row_index if places else -1
            if entity is None or not 0 <= row < len(texts):
                return [Unscannable(ERROR, "UnexpectedFinding") for _ in texts]
            score = LIKELIHOODS.get(each.likelihood.name, 1.0)
            found[row].append(Finding(span.start, span.end, entity, score, each.info_type.name))
        return list(found)

    def _halves(self, texts: list[str]) -> list[Scan]:
        middle = len(texts) // 2
        return self._inspect(texts[:middle]) + self._inspect(texts[middle:])

    def _ask(self, texts: list[str]) -> Any:
        """The service's result for a table with one text a row; what passes by itself is asked again.

        Raises:
            Exception: it does not take these texts, or makes no sense.
            EagleError: it takes none, or does not answer for longer than allowed.
        """
        import requests
        from google.api_core import exceptions, retry
        from google.auth.exceptions import GoogleAuthError

        limit = self._search.rules.dlp.timeout_s
        request = {
            "parent": self._parent,
            "inspect_config": self._inspect_config,
            "item": {
                "table": {
                    "headers": [{"name": "text"}],
                    "rows": [{"values": [{"string_value": text}]} for text in texts],
                }
            },
        }
        again = (
            exceptions.TooManyRequests,
            exceptions.InternalServerError,
            exceptions.BadGateway,
            exceptions.ServiceUnavailable,
            exceptions.GatewayTimeout,
            requests.ConnectionError,
            requests.Timeout,
        )
        try:
            response = self._client.inspect_content(
                request=request,
                retry=retry.Retry(retry.if_exception_type(*again), initial=0.5, maximum=20.0, timeout=limit),
                timeout=min(_REQUEST_S, limit),
            )
        except (exceptions.Unauthorized, exceptions.Forbidden, exceptions.NotFound, GoogleAuthError) as error:
            raise EagleError(
                f"Google's Sensitive Data Protection refuses {self._parent} ({type(error).__name__}): "
                f"{_LOGIN}"
            ) from None
        except (*again, exceptions.RetryError) as error:
            raise EagleError(
                f"Google's Sensitive Data Protection does not answer for {limit:.0f} s "
                f"({type(error).__name__}): run "
                "the same command again later"
            ) from None
        except exceptions.BadRequest as error:
            if texts == [_PROBE]:
                reason = " ".join(str(error.message).split())[:200]
                raise EagleError(
                    f"Google's Sensitive Data Protection does not take these settings: {reason}"
                ) from None
            raise
        return response.result


def _size(text: str) -> int:
    """Bytes that a text takes in a request: most scripts have six for a character in JSON."""
    return len(json.dumps({"values": [{"stringValue": text}]})) + 2


def _requests(texts: dict[int, str]) -> Iterator[list[int]]:
    """The numbers of the texts in groups that fit into one request each."""
    group: list[int] = []
    size = 0
    for number, text in texts.items():
        more = _size(text)
        if group and (size + more > MAX_REQUEST_BYTES or len(group) == MAX_REQUEST_TEXTS):
            yield group
            group, size = [], 0
        group.append(number)
        size += more
    if group:
        yield group


def _connect(search: Search) -> tuple[DlpServiceClient, str]:
    """A client over HTTP, and the project and place that requests name.

    Raises:
        EagleError: there are no credentials, or no project.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.dlp_v2 import DlpServiceClient
    from google.cloud.dlp_v2.services.dlp_service.transports import DlpServiceRestTransport

    rules = search.rules.dlp
    address = urlsplit(rules.endpoint or "https://dlp.googleapis.com")
    if address.scheme not in ("http", "https") or not address.netloc:
        raise EagleError(f"dlp: endpoint {rules.endpoint} in --pii-config is no http:// or https:// address")
    project: str | None = None
    if address.scheme == "http":
        credentials: Any = AnonymousCredentials()
    else:
        try:
            credentials, project = google.auth.default(["https://www.googleapis.com/auth/cloud-platform"])
        except DefaultCredentialsError:
            raise EagleError(f"no Google credentials found for --pii-engine dlp: {_LOGIN}") from None
    project = rules.project or project
    if not project:
        raise EagleError(f"no project for --pii-engine dlp: {_LOGIN}")
    transport = DlpServiceRestTransport(
        host=address.netloc, url_scheme=address.scheme, credentials=credentials
    )
    return DlpServiceClient(transport=transport), f"projects/{project}/locations/{rules.location}"
