"""What happens to prompts and answers with findings, and what is left behind of them: numbers and shapes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest

from stages.gen_data.privacy import email
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.scrubber import Scrubber
from stages.prompts import Prompt

HUNTER = "hunt" + "er2x"
PROMPTS = [
    Prompt("clean", ("hi",), "a"),
    Prompt(
        "mail", ("hi", "a@b.com and c@d.org", "8.8.8.8"), "a", category="x", license="y", system="i@j.com"
    ),
    Prompt("secret", ("mail a@b.com", f"password: {HUNTER}"), "b"),
    Prompt("many", tuple(f"m{i}@example.com" for i in range(6)), "b"),
    Prompt("five", tuple(f"m{i}@example.com" for i in range(5)), "b"),
    Prompt("long", ("a@b.com", "x" * 20_001), "b"),
]
BY_SOURCE = {"a": {"EMAIL_ADDRESS": 3, "IP_ADDRESS": 1}, "b": {"EMAIL_ADDRESS": 12, "SECRET": 1}}


def scrubbed(scrubber: Scrubber, prompts=PROMPTS) -> tuple[list[Prompt], Counter]:
    left_out: Counter = Counter()
    kept = list(scrubber.scrubbed(prompts, lambda source, reason: left_out.update([(source, reason)])))
    return kept, left_out


def test_redact_replaces_what_it_keeps_and_drops_secrets_and_rows_with_many_findings():
    scrubber = Scrubber(PrivacyConfig())
    kept, left_out = scrubbed(scrubber)
    turns = ("hi", "<EMAIL_ADDRESS> and <EMAIL_ADDRESS>", "<IP_ADDRESS>")
    assert kept == [
        PROMPTS[0],
        Prompt("mail", turns, "a", category="x", license="y", system="<EMAIL_ADDRESS>"),
        Prompt("five", ("<EMAIL_ADDRESS>",) * 5, "b"),
    ]
    assert left_out == {
        ("b", "secret"): 1,
        ("b", "much_personal_data"): 1,
        ("b", "unscannable_too_long"): 1,
    }
    assert scrubber.counts() == {
        "pii": {"EMAIL_ADDRESS": 15, "IP_ADDRESS": 1, "SECRET": 1},
        "pii_by_source": BY_SOURCE,
        "pii_rows": {"a": 1, "b": 1},
    }


def test_drop_keeps_only_prompts_without_findings():
    kept, left_out = scrubbed(Scrubber(PrivacyConfig(pii="drop")))
    assert kept == PROMPTS[:1]
    assert left_out == {
        ("a", "personal_data"): 1,
        ("b", "personal_data"): 2,
        ("b", "secret"): 1,
        ("b", "unscannable_too_long"): 1,
    }


def test_flag_changes_nothing_and_counts_and_still_lets_nothing_pass_that_was_not_searched():
    scrubber = Scrubber(PrivacyConfig(pii="flag"))
    kept, left_out = scrubbed(scrubber)
    assert kept == PROMPTS[:5]
    assert left_out == {("b", "unscannable_too_long"): 1}
    assert scrubber.counts()["pii_by_source"] == BY_SOURCE
    assert scrubber.counts()["pii_rows"] == {"a": 1, "b": 3}


def test_off_searches_nothing(monkeypatch):
    monkeypatch.setattr("stages.gen_data.privacy.scrubber.make_detector", lambda search: 1 / 0)
    scrubber = Scrubber(PrivacyConfig(pii="off"))
    assert scrubbed(scrubber) == (PROMPTS, Counter())
    scrubber.check_answers([Dialogue(PROMPTS[0], [{"role": "assistant", "content": "a@b.com"}])])
    assert scrubber.settings() == {}
    assert scrubber.counts()["pii"] == {}


def test_an_error_of_a_recognizer_drops_the_prompt_and_is_counted_by_reason(monkeypatch):
    monkeypatch.setattr(email, "_end_of_domain", lambda text: 1 / 0)
    scrubber = Scrubber(PrivacyConfig())
    kept, left_out = scrubbed(scrubber, PROMPTS[:2])
    assert kept == PROMPTS[:1]
    assert left_out == {("a", "unscannable_error"): 1}
    assert scrubber.counts()["pii"] == {}


def test_rules_say_which_entities_drop_a_prompt_and_how_many_findings_are_many(tmp_path):
    (tmp_path / "rules.yaml").write_text("drop: [IP_ADDRESS]\nmax_findings: 4")
    kept, left_out = scrubbed(Scrubber(PrivacyConfig(pii_config=str(tmp_path / "rules.yaml"))))
    assert [prompt.id for prompt in kept] == ["clean", "secret"]
    assert kept[1].turns == ("mail <EMAIL_ADDRESS>", "password: <SECRET>")
    assert left_out[("a", "ip_address")] == 1
    assert left_out[("b", "much_personal_data")] == 2


def test_tool_definitions_are_searched_and_stay_json():
    def tools(default: object) -> str:
        return json.dumps([{"name": "mail", "default": default}])

    prompts = [
        Prompt("1", ("hi",), "a", tools=tools("a@b.com")),
        Prompt("2", ("hi",), "a", tools=f'[{{"phone": +1{"2125550123"}}}]'),
    ]
    kept, left_out = scrubbed(Scrubber(PrivacyConfig()), prompts)
    assert [json.loads(prompt.tools) for prompt in kept] == [[{"name": "mail", "default": "<EMAIL_ADDRESS>"}]]
    assert left_out == {("a", "personal_data"): 1}


@dataclass
class Dialogue:
    prompt: Prompt
    messages: list[dict[str, str]]
    withdrawn: list[str] = field(default_factory=list)

    def withdraw(self, reason: str) -> None:
        self.withdrawn.append(reason)


def answered(*answers: str) -> Dialogue:
    user = {"role": "user", "content": "u@v.com"}
    turns = [[user, {"role": "assistant", "content": answer}] for answer in answers]
    return Dialogue(PROMPTS[0], [message for turn in turns for message in turn])


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ({}, [[], ["personal_data_in_answer"], ["unscannable_answer_too_long"]]),
        ({"pii": "drop"}, [[], ["personal_data_in_answer"], ["unscannable_answer_too_long"]]),
        ({"pii": "flag"}, [[], [], ["unscannable_answer_too_long"]]),
        ({"pii_responses": False}, [[], [], []]),
    ],
)
def test_dialogues_with_a_finding_in_any_answer_are_withdrawn_and_the_others_untouched(flags, reasons):
    scrubber = Scrubber(PrivacyConfig(**flags))
    dialogues = [answered("fine"), answered("a@b.com", "ok, c@d.org"), answered("x" * 20_001)]
    before = [dict(message) for dialogue in dialogues for message in dialogue.messages]
    scrubber.check_answers(dialogues)
    assert [dialogue.withdrawn for dialogue in dialogues] == reasons
    assert [message for dialogue in dialogues for message in dialogue.messages] == before
    found = {"a": {"EMAIL_ADDRESS": 2}} if flags != {"pii_responses": False} else {}
    assert scrubber.take_answer_counts() == {"pii_in_answers": found}
    assert scrubber.take_answer_counts() == {"pii_in_answers": {}}


def test_reasoning_that_is_kept_apart_is_searched_too():
    dialogue = Dialogue(PROMPTS[0], [{"role": "assistant", "content": "ok", "reasoning_content": "a@b.com"}])
    Scrubber(PrivacyConfig()).check_answers([dialogue])
    assert dialogue.withdrawn == ["personal_data_in_answer"]


def test_the_report_shows_findings_masked_with_their_place(tmp_path):
    report = tmp_path / "new" / "report.jsonl"
    scrubber = Scrubber(PrivacyConfig(pii_report=str(report)))
    scrubbed(scrubber)
    scrubber.check_answers([answered("write to Jane.Doe@example.com, or 219-09-9999")])
    scrubber.write_report()
    text = report.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert not any(part in text for part in ("b.com", "example", "8.8.8", HUNTER, "Jane", "219"))
    assert {
        "id": "clean", "source": "a", "where": "answer 1", "entity": "EMAIL_ADDRESS", "form": "",
        "score": 0.9, "text": "write to Aaaa.Aaa@aaaaaaa.aaa, or 000-00-0000",
    } in lines  # fmt: skip
    assert {line["where"] for line in lines if line["id"] == "mail"} == {"system", "turn 2", "turn 3"}
    unscannable = {"id": "long", "source": "b", "where": "turn 2", "unscannable": "too_long", "error": ""}
    assert unscannable in lines


def test_the_report_is_a_sample_of_each_kind_and_the_same_in_any_order(tmp_path):
    prompts = [Prompt(str(i), (f"m{i}@example.com",), "a") for i in range(250)]
    reports = []
    for order in (prompts, prompts[::-1]):
        path = tmp_path / "report.jsonl"
        scrubber = Scrubber(PrivacyConfig(pii_report=str(path)))
        scrubbed(scrubber, [*order, Prompt("ip", ("8.8.8.8",), "a")])
        scrubber.write_report()
        reports.append(path.read_text())
    ids = [json.loads(line)["id"] for line in reports[0].splitlines()]
    assert reports[0] == reports[1]
    assert len(ids) == 101
    assert "ip" in ids
    assert 20 < sum(int(i) < 125 for i in ids if i != "ip") < 80


def test_the_artifact_knows_what_searched_and_how(tmp_path):
    settings = Scrubber(PrivacyConfig()).settings()
    assert set(settings) == {"pii_analyzer", "pii_digest"}
    assert "presidio-analyzer" in settings["pii_analyzer"]
    other = Scrubber(PrivacyConfig(pii_entities=["URL"])).settings()
    assert other["pii_digest"] != settings["pii_digest"]
    report = Scrubber(PrivacyConfig(pii_report=str(tmp_path / "r"))).settings()
    assert report == settings
