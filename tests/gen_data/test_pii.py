from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.gen_data import recognizers
from stages.gen_data.pii import MAX_SCAN_CHARS, Finding, Scrubber, redact, resolve
from stages.prompts import Prompt

PERSONAL = [
    ("write to jane.doe+x@example.co.uk, please", "write to <EMAIL_ADDRESS>, please"),
    ("<bob@sub.m\u00fcnchen.de>", "<<EMAIL_ADDRESS>>"),
    ("mail 'jane_doe@gmail.com' or bob@x.io.", "mail '<EMAIL_ADDRESS>' or <EMAIL_ADDRESS>."),
    ("a" * 100 + "@example.com", "a" * 36 + "<EMAIL_ADDRESS>"),
    ("Call 555-123-4567.", "Call <PHONE_NUMBER>."),
    ("It was (212) 555-0123 or 212.555.0124", "It was <PHONE_NUMBER> or <PHONE_NUMBER>"),
    ("She wrote +1 212 555 0123 on a card", "She wrote <PHONE_NUMBER> on a card"),
    ("+44 20 7946 0958, +49 30 901820", "<PHONE_NUMBER>, <PHONE_NUMBER>"),
    ("in London: 020 7946 0958", "in London: <PHONE_NUMBER>"),
    ("my phone: 2125550123", "my phone: <PHONE_NUMBER>"),
    ("pay with 4111 1111 1111 1111 now", "pay with <CREDIT_CARD> now"),
    ("378282246310005 or 5555-5555-5555-4444", "<CREDIT_CARD> or <CREDIT_CARD>"),
    ("send it to DE89 3704 0044 0532 0130 00 today", "send it to <IBAN_CODE> today"),
    ("219-09-9999", "<US_SSN>"),
    ("her social security number is 219099999", "her social security number is <US_SSN>"),
    ("ping 8.8.8.8 and 2001:4860:4860::8888", "ping <IP_ADDRESS> and <IP_ADDRESS>"),
]
HARMLESS = [
    "192.168.0.1, 10.0.0.1, 172.16.3.4, 127.0.0.1, 169.254.1.1, 0.0.0.0, 255.255.255.0, ::1, fe80::1",
    "version 1.2.3.4, v2.0.0.1",
    "std::face::add(a::b), 12:34:56, 00:11:22:33:44:55",
    "2024-01-15, 31/12/1999, 01-02-2003, 2023-2024 10:30:45",
    "x = 12 34 56 78 90; 03 06 09 12 15; 4 8 15 16 23 42; 1-2-3-4-5-6-7-8-9",
    "Is 2147483647 prime? call f(1000000007)",
    "100 200 3000, 555-123 = 432, 123 45 6789",
    "3.14159265358979323846, 0.2079460958, 6.02214076e23, 1,234,567,890",
    "the number 3141592653589793, 4111111111111112, timestamp 1700000000",
    "978-3-16-148410-0, ISBN 9783161484100",
    "C = A@B.T, np.li @ x, @app.route('/x'), user@localhost",
    "My name is Ada, I live in Paris, see https://example.com on Monday.",
]


def scrub(text: str) -> str:
    clean = Scrubber().scrub(Prompt("1", (text,), ""))
    assert clean is not None
    return clean.turns[0]


@pytest.mark.parametrize(("text", "expected"), PERSONAL)
def test_personal_data_become_placeholders(text, expected):
    assert scrub(text) == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_numbers_code_dates_names_and_private_addresses_stay(text):
    assert scrub(text) == text


def test_system_message_and_every_turn_are_scrubbed_and_counted_by_kind():
    scrubber = Scrubber()
    prompt = Prompt(
        "1", ("hi", "a@b.com and c@d.org", "8.8.8.8"), "s", category="x", license="y", system="i@j.com"
    )
    clean = scrubber.scrub(prompt)
    turns = ("hi", "<EMAIL_ADDRESS> and <EMAIL_ADDRESS>", "<IP_ADDRESS>")
    assert clean == Prompt("1", turns, "s", category="x", license="y", system="<EMAIL_ADDRESS>")
    assert scrubber.found == {"EMAIL_ADDRESS": 3, "IP_ADDRESS": 1}


def test_text_too_long_to_scan_does_not_pass():
    assert Scrubber().scrub(Prompt("1", ("fine", "a" * MAX_SCAN_CHARS), "")) is not None
    assert Scrubber().scrub(Prompt("1", ("fine", "a" * (MAX_SCAN_CHARS + 1)), "")) is None


def test_a_recognizer_that_fails_or_runs_out_of_time_lets_nothing_pass(monkeypatch):
    prompt = Prompt("1", ("a@b.com",), "")
    with monkeypatch.context() as patch:
        patch.setattr("presidio_analyzer.pattern_recognizer.REGEX_TIMEOUT_SECONDS", 0)
        assert Scrubber().scrub(prompt) is None
    monkeypatch.setattr(recognizers.Email, "validate_result", lambda self, text: 1 / 0)
    scrubber = Scrubber()
    assert scrubber.scrub(prompt) is None
    assert not scrubber.found


@pytest.mark.parametrize("unit", ["a.", "%", "1-", ":a", "AB12 ", "1 ", "@.", "+1", "a@a.", "12"])
def test_the_longest_text_that_is_scanned_takes_seconds_at_most(unit):
    text = (unit * MAX_SCAN_CHARS)[: MAX_SCAN_CHARS - 10] + "@ 1 2 3 4"
    start = time.process_time()
    scrub(text)
    assert time.process_time() - start < 10


def test_scrubbing_opens_no_connection(monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert scrub("a@b.com, phone 2125550123") == "<EMAIL_ADDRESS>, phone <PHONE_NUMBER>"


findings = st.builds(
    lambda start, length, entity, score: Finding(start, start + length, entity, score),
    st.integers(0, 30),
    st.integers(1, 10),
    st.sampled_from(["A", "B", "C"]),
    st.sampled_from([0.5, 0.6, 1.0]),
)


@given(st.lists(findings, max_size=8))
def test_resolved_findings_cover_the_same_characters_without_overlap(found):
    resolved = resolve(found)
    covered = [i for finding in resolved for i in range(finding.start, finding.end)]
    assert covered == sorted({i for finding in found for i in range(finding.start, finding.end)})
    assert resolve(reversed(found)) == resolved


def test_overlapping_findings_become_one_named_after_the_surest():
    found = [
        Finding(0, 6, "PHONE_NUMBER", 0.6),
        Finding(4, 12, "CREDIT_CARD", 1.0),
        Finding(12, 14, "US_SSN", 0.5),
    ]
    assert resolve(found) == [Finding(0, 12, "CREDIT_CARD", 1.0), Finding(12, 14, "US_SSN", 0.5)]
    assert redact("0123456789ab12!", resolve(found)) == "<CREDIT_CARD><US_SSN>!"
