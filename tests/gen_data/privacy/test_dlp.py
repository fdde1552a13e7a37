"""The search by Google's service, against its HTTP API on loopback."""

from __future__ import annotations

import pytest

from stages.errors import EagleError
from stages.gen_data.privacy import dlp
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import ERROR, Unscannable, make_detector
from stages.gen_data.privacy.finding import redact
from stages.gen_data.privacy.pool import FEW_ROWS
from stages.gen_data.privacy.rules import Search
from stages.gen_data.privacy.scrubber import Scrubber
from stages.prompts import Prompt
from tests.gen_data.privacy.dlp_server import DlpServer, running_dlp_server

pytest.importorskip("google.cloud.dlp_v2")
HUNTER = "hunt" + "er2x"


@pytest.fixture
def server():
    with running_dlp_server() as server:
        yield server


def config(server: DlpServer, tmp_path, rules: str = "", **flags) -> PrivacyConfig:
    path = tmp_path / "rules.yaml"
    path.write_text(
        f"dlp: {{project: p, endpoint: '{server.endpoint}', location: europe-west3, timeout_s: 4}}\n{rules}"
    )
    return PrivacyConfig(pii_engine="dlp", pii_config=str(path), **flags)


def search(server: DlpServer, tmp_path, rules: str = "", **flags) -> Search:
    return Search.of(config(server, tmp_path, rules, **flags))


def test_many_texts_are_searched_in_one_request_and_places_are_those_of_the_text_as_it_was(server, tmp_path):
    texts = ["", "\U0001f600 ja\u200bne@x.com!", "212-555-0123 and 10.0.0.1, 8.8.8.8", "nothing"]
    scans = make_detector(search(server, tmp_path)).scan(texts)
    assert [redact(text, scan) for text, scan in zip(texts, scans, strict=True)] == [
        "",
        "\U0001f600 <EMAIL_ADDRESS>!",
        "<PHONE_NUMBER> and 10.0.0.1, <IP_ADDRESS>",
        "nothing",
    ]
    assert server.requests == [["\U0001f600 jane@x.com!", *texts[2:]]]
    assert not server.configs[-1].get("includeQuote")


def test_what_the_service_does_not_know_is_found_here_and_secrets_are_never_sent(server, tmp_path):
    texts = [f"a@b.com password: {HUNTER}", "0xd8dA6BF26964aF9D7eEd9e03E53415D37aA96045 a@b.com"]
    scans = make_detector(search(server, tmp_path)).scan(texts)
    assert [[finding.entity for finding in scan] for scan in scans] == [
        ["SECRET"],
        ["CRYPTO", "EMAIL_ADDRESS"],
    ]
    assert server.requests == [texts[1:]]


def test_the_threshold_is_a_likelihood(server, tmp_path):
    text = "Ada has 212-555-0123 and a@b.com"

    def entities(**flags) -> list[str]:
        [scan] = make_detector(search(server, tmp_path, **flags)).scan([text])
        return [finding.entity for finding in scan]

    every = ["default", "person"]
    assert entities(pii_entities=every) == ["PHONE_NUMBER", "EMAIL_ADDRESS"]
    assert entities(pii_entities=every, pii_threshold=0.2) == ["PERSON", "PHONE_NUMBER", "EMAIL_ADDRESS"]
    assert entities(pii_entities=every, pii_threshold=0.7) == ["EMAIL_ADDRESS"]
    assert entities(rules="thresholds: {EMAIL_ADDRESS: 0.8}") == ["PHONE_NUMBER"]
    assert entities(rules="allow: [a@b.com]") == ["PHONE_NUMBER"]


def test_requests_stay_within_the_limits_of_the_service(server, tmp_path):
    texts = ["\u4e2d" * 15_000] * 12 + ["x"] * 2_500
    scans = make_detector(search(server, tmp_path)).scan(texts)
    assert all(scan == [] for scan in scans)
    assert sum(len(request) for request in server.requests) == len(texts)
    assert max(len(request) for request in server.requests) <= dlp.MAX_REQUEST_TEXTS


def test_a_request_with_more_findings_than_the_service_gives_is_asked_in_halves(server, tmp_path):
    texts = ["a@b.com " * 1_900, "c@d.com " * 1_900, "e@f.com"]
    scans = make_detector(search(server, tmp_path)).scan(texts)
    assert [len(scan) for scan in scans] == [1_900, 1_900, 1]
    assert make_detector(search(server, tmp_path, "max_chars: 100000")).scan(["a@b.com " * 3_001]) == [
        Unscannable(ERROR, "TooManyFindings")
    ]


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_what_passes_by_itself_is_asked_again(server, tmp_path, code):
    detector = make_detector(search(server, tmp_path))
    server.failures = [code, code]
    [scan] = detector.scan(["a@b.com"])
    assert [finding.entity for finding in scan] == ["EMAIL_ADDRESS"]


def test_a_service_that_stays_away_ends_the_search_with_one_line(server, tmp_path):
    detector = make_detector(search(server, tmp_path))
    server.failures = [503] * 1000
    with pytest.raises(EagleError, match="does not answer for 4 s"):
        detector.scan(["a@b.com"])


def test_an_address_where_nobody_listens_ends_the_search_with_one_line(server, tmp_path):
    closed = search(server, tmp_path)
    rules = closed.rules.model_copy(
        update={
            "dlp": closed.rules.dlp.model_copy(update={"endpoint": "http://127.0.0.1:9", "timeout_s": 1.0})
        }
    )
    with pytest.raises(EagleError, match="does not answer for 1 s"):
        make_detector(Search("dlp", closed.entities, 0.5, "en", rules))


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_refusal_says_how_to_log_in_and_is_not_repeated(server, tmp_path, code):
    server.failures = [code]
    with pytest.raises(EagleError, match=r"refuses projects/p/locations/europe-west3.*gcloud auth"):
        make_detector(search(server, tmp_path))
    assert server.asked == 1


def test_settings_that_the_service_does_not_take_show_at_once(server, tmp_path):
    rules = search(server, tmp_path).rules
    wrong = rules.model_copy(
        update={"dlp": rules.dlp.model_copy(update={"info_types": {"URL": ("NO_SUCH",)}})}
    )
    with pytest.raises(EagleError, match=r"does not take these settings.*NO_SUCH"):
        make_detector(Search("dlp", ("URL",), 0.5, "en", wrong))


def test_only_the_text_that_the_service_does_not_take_is_unscannable(server, tmp_path):
    detector = make_detector(search(server, tmp_path))
    server.refused = "poison"
    texts = ["a@b.com", "poison", "c@d.com", "fine", "8.8.8.8"]
    scans = detector.scan(texts)
    assert scans[1] == Unscannable(ERROR, "BadRequest")
    assert [isinstance(scan, Unscannable) for scan in scans] == [False, True, False, False, False]
    assert "poison" not in str(scans)


def test_findings_that_make_no_sense_let_nothing_pass(server, tmp_path):
    detector = make_detector(search(server, tmp_path))
    server.row = 7
    assert detector.scan(["a@b.com", "fine"]) == [Unscannable(ERROR, "UnexpectedFinding")] * 2
    server.row = 1
    assert detector.scan(["a@b.com", "fine"]) == [[], Unscannable(ERROR, "FindingOutOfText")]


def test_rows_are_asked_several_requests_at_a_time_and_come_in_their_order(server, tmp_path):
    scrubber = Scrubber(config(server, tmp_path))
    prompts = [Prompt(str(i), (f"mail {i}@example.com",), "a") for i in range(FEW_ROWS + 100)]
    kept = list(scrubber.scrubbed(prompts, lambda source, reason: None))
    assert [prompt.id for prompt in kept] == [prompt.id for prompt in prompts]
    assert {prompt.turns for prompt in kept} == {("mail <EMAIL_ADDRESS>",)}
    assert len(server.requests) == -(-len(prompts) // 32)


def test_a_service_that_goes_away_ends_a_scrub(server, tmp_path):
    scrubber = Scrubber(config(server, tmp_path))
    kept = scrubber.scrubbed([Prompt("1", ("a@b.com",), "a")] * 40, lambda source, reason: None)
    next(kept)
    server.failures = [403] * 10
    with pytest.raises(EagleError, match="refuses"):
        list(scrubber.scrubbed([Prompt("1", ("a@b.com",), "a")], lambda source, reason: None))


def test_no_credentials_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(EagleError, match=r"no Google credentials found.*gcloud auth"):
        make_detector(Search.of(PrivacyConfig(pii_engine="dlp")))
