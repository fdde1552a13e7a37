import ast
import hashlib
import json
import re
from collections import Counter, defaultdict
from functools import cache

import pytest

from stages.errors import EagleError
from stages.prompts.builtin import BUILTIN_SETS, CATEGORIES, _evaluate, _expand, load_builtin

# Update only when the prompts are meant to change: measurements on other prompts cannot be compared.
DIGESTS = {"chat": "c4cf72febfbc1d93", "eval": "08de567f9c405714"}

PII_LIKE = {
    "e-mail": r"\S+@\S+\.\w+",
    "web address": r"https?://|www\.",
    "phone or card number": r"\+\d|\d[\d ().-]{7,}\d",
    "IP address": r"\b\d{1,3}(\.\d{1,3}){3}\b",
    "date of numbers": r"\b\d{1,4}[-/.]\d{1,2}[-/.]\d{2,4}\b",
}


@cache
def rows(name: str) -> list[dict]:
    return load_builtin(name)


def turns(name: str) -> list[str]:
    return [turn for row in rows(name) for turn in row["turns"]]


def normalized(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+|[^\sa-z0-9'\"]", text.lower()))


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return frozenset(zip(words, words[1:], words[2:], strict=False))


@pytest.mark.parametrize(("name", "least"), [("chat", 1500), ("eval", 80)])
def test_rows_have_the_documented_form(name, least):
    assert len(rows(name)) >= least
    for index, row in enumerate(rows(name)):
        assert set(row) == {"id", "category", "turns"}
        assert row["id"] == f"{name}-{index:05d}"
        assert row["category"] in CATEGORIES
        assert 1 <= len(row["turns"]) <= 3


def test_chat_is_balanced_with_more_math_and_coding():
    counts = Counter(row["category"] for row in rows("chat"))
    share = {category: counts[category] / len(rows("chat")) for category in CATEGORIES}
    assert 0.15 < share["math"] < 0.25
    assert 0.12 < share["coding"] < 0.18
    assert all(0.08 < share[category] < 0.15 for category in set(CATEGORIES) - {"math", "coding"})


def test_eval_has_the_same_number_of_prompts_in_each_category():
    counts = Counter(row["category"] for row in rows("eval"))
    assert set(counts) == set(CATEGORIES)
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("name", BUILTIN_SETS)
@pytest.mark.parametrize("first", [40, 80])
def test_the_first_rows_are_a_balanced_mix(name, first):
    whole = Counter(row["category"] for row in rows(name))
    head = Counter(row["category"] for row in rows(name)[:first])
    for category in CATEGORIES:
        assert abs(head[category] - first * whole[category] / len(rows(name))) <= 1.5


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_first_turns_are_distinct(name):
    counts = Counter(normalized(row["turns"][0]) for row in rows(name))
    assert [text for text, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_about_a_sixth_of_the_prompts_have_several_turns(name):
    multi_turn = sum(len(row["turns"]) > 1 for row in rows(name))
    assert 0.10 < multi_turn / len(rows(name)) < 0.20


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_the_rows_never_change(name):
    digest = hashlib.sha256(json.dumps(load_builtin(name)).encode()).hexdigest()[:16]
    assert digest == DIGESTS[name]


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_turns_are_clean_text_of_sane_length(name):
    for turn in turns(name):
        assert not re.search(r"\{[A-Za-z]\w*\}", turn), turn
        assert 2 <= len(turn.split()) < 200, turn
        assert turn == turn.lstrip(), turn
        assert "  " not in turn.partition("\n")[0], turn
        assert not re.search(r"\b[Aa] (?!uni|use|one)[aeiou]\w+ |\b(\w+) \1 ", turn.partition("\n")[0]), turn


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_prompts_are_neither_terse_nor_long_on_average(name):
    lengths = [sum(len(turn.split()) for turn in row["turns"]) for row in rows(name)]
    assert 15 < sum(lengths) / len(lengths) < 60


@pytest.mark.parametrize("kind", PII_LIKE)
@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_nothing_looks_like_personal_data(name, kind):
    assert [turn for turn in turns(name) if re.search(PII_LIKE[kind], turn)] == []


def test_eval_shares_nothing_with_chat():
    chat_texts = {normalized(turn) for turn in turns("chat")}
    chat_by_trigram = defaultdict(set)
    for grams in map(trigrams, chat_texts):
        for gram in grams:
            chat_by_trigram[gram].add(grams)
    for turn in turns("eval"):
        assert normalized(turn) not in chat_texts
        grams = trigrams(turn)
        overlapping = set().union(*(chat_by_trigram[gram] for gram in grams))
        assert not any(len(grams & other) > 0.5 * len(grams | other) for other in overlapping), turn


def test_an_unknown_set_is_an_error_that_names_the_known_ones():
    with pytest.raises(EagleError, match=r"'chatt'.*chat, eval"):
        load_builtin("chatt")


def test_a_template_is_filled_with_drawn_joint_and_computed_values():
    template = {
        "text": "{Name} buys {n} {fruit}, {total} cents.",
        "slots": {
            "name": ["ana"],
            "n": {"from": 2, "to": 6, "step": 2},
            "fruit,cents": [["figs", 10], ["pears", 20]],
            "total": "n * cents",
        },
        "count": 6,
    }
    texts = _expand(template, {}, "seed")
    assert sorted(texts) == sorted(
        f"Ana buys {n} {fruit}, {n * cents} cents."
        for n in (2, 4, 6)
        for fruit, cents in (("figs", 10), ("pears", 20))
    )


def test_a_template_with_too_few_fillings_is_refused():
    with pytest.raises(ValueError, match="too few"):
        _expand({"text": "{x}", "slots": {"x": ["a", "b"]}, "count": 3}, {}, "seed")


def test_an_inexact_division_is_refused():
    with pytest.raises(ValueError, match="inexact"):
        _evaluate(ast.parse("n // 2", mode="eval").body, {"n": 7})
