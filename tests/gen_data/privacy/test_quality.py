"""How good the default search must be, on labelled texts of our own and on the built-in prompts."""

from __future__ import annotations

import re
from collections import Counter
from importlib import resources

import pytest

from stages.gen_data.privacy.config import DEFAULT_ENTITIES
from stages.gen_data.privacy.evaluate import evaluate, main, table
from stages.gen_data.privacy.keys import find_keys
from stages.gen_data.privacy.labelled import Case, read_cases
from stages.prompts import iter_prompts

MIN_RECALL, MAX_FALSE_POSITIVES = 0.95, 0.01


@pytest.fixture(scope="module")
def quality(detector):
    return evaluate(detector, read_cases())


def test_what_the_default_search_covers_is_found(quality):
    assert quality.recall >= MIN_RECALL, table(quality)
    for entity, expected in quality.expected.items():
        assert quality.found[entity] >= 0.9 * expected, f"{entity}: {[c.text for c in quality.missed]}"


def test_harmless_texts_are_left_alone(quality):
    assert quality.false_positive_rate <= MAX_FALSE_POSITIVES, [c.text for c in quality.wrong]
    assert quality.invented <= 2, [c.text for c in quality.wrong]


@pytest.mark.parametrize("source", ["builtin:chat", "builtin:eval"])
def test_built_in_prompts_are_left_alone(detector, source):
    prompts = list(iter_prompts(source))
    flagged = [prompt for prompt in prompts if any(detector.scan([prompt.system, *prompt.turns]))]
    assert len(flagged) <= MAX_FALSE_POSITIVES * len(prompts), flagged


def test_the_labelled_texts_have_every_entity_in_many_forms_and_traps_of_many_kinds():
    cases = read_cases()
    expected = Counter(entity for case in cases for entity, _, _ in case.expected)
    traps = Counter(case.trap for case in cases if not case.expected)
    assert len(cases) >= 300
    assert set(expected) == set(DEFAULT_ENTITIES)
    assert min(expected.values()) >= 10
    assert len(traps) >= 10
    assert "" not in traps


def test_nothing_in_the_file_looks_like_a_secret_to_those_who_scan_source_code():
    file = resources.files("stages.gen_data.privacy") / "data" / "labelled.jsonl"
    lines = file.read_text("utf-8").split("\n")
    providers = [line for line in lines for found in find_keys(line) if found.form not in _NOT_SCANNED]
    assert not providers
    assert not re.search(r"[A-Za-z0-9]{33}", "\n".join(line for line in lines if "SECRET:" in line))


_NOT_SCANNED = (
    "address with a password",
    "password on a command line",
    "authorization header",
    "AWS secret key",
)


def test_recall_counts_what_is_found_whole_and_under_its_name(detector):
    text = "mail jane@example.com or 8.8.8.8"
    email, ip = ("EMAIL_ADDRESS", 5, 21), ("IP_ADDRESS", 25, 32)
    wrong_name = Case(text, (("PHONE_NUMBER", *email[1:]), ip))
    too_short = Case(text, ((email[0], 4, 21), ip))
    both = evaluate(detector, [Case(text, (email, ip)), wrong_name, too_short, Case("a@bcd.com", ())])
    assert both.recall == 4 / 6
    assert both.false_positive_rate == 1
    assert evaluate(detector, [Case(text, (email,))]).invented == 1


def test_the_command_prints_recall_by_entity_and_counts_findings_in_prompts(capsys):
    assert main(["--prompts", "builtin:eval", "--missed"]) == 0
    out = capsys.readouterr().out
    assert all(entity in out for entity in DEFAULT_ENTITIES)
    assert re.search(r"harmless texts: \d+, with a finding: \d+ \(", out)
    assert "builtin:eval: 96 prompts, with a finding: 0 (0.00%)" in out
