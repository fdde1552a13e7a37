"""The prompt sets that ship with the package.

``chat`` is what training answers are generated from: hand-written seeds, and templates filled with
hand-written values. ``eval`` is what speed-ups are measured on: written separately, sharing no text with
``chat``. Both cover the same eight categories, in an order whose first N rows are a balanced mix.

Data files, one JSON object each:

- ``data/eval.json``: category -> prompts. A prompt is a string, or a list of strings for several user turns.
- ``data/chat/<category>.json``:
    - ``seeds``: prompts, taken as they are.
    - ``templates``: ``text`` (a string, or wordings to alternate between), ``slots``, ``count`` (how many
      prompts to make) and optionally its own ``follow_ups``.
    - ``slots``: shared by the file's templates.
    - ``follow_ups``: later turns that make sense whatever the answer to the first one was.

A slot is a list of values, ``{"from": 2, "to": 9, "step": 1}``, or arithmetic over other slots such as
``"boxes * price"`` (``+ - * //``; a division must be exact). A key such as ``"name,she"`` binds several names
at once from rows of values. In a text, ``{fruit}`` is the value and ``{Fruit}`` the value with a capital.
"""

import ast
import json
import operator
import re
from collections.abc import Iterator
from importlib.resources import files
from random import Random

from stages.errors import EagleError

BUILTIN_SETS = ("chat", "eval")
CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

# Of the prompts made from templates, how many get follow-up turns (seeds bring their own).
FOLLOW_UP_SHARE = 0.17

Turns = list[str]


def load_builtin(name: str) -> list[dict]:
    """Return the rows of a built-in set: ``{"id": "chat-00012", "category": "math", "turns": ["..."]}``.

    Every call, on every machine, returns the same rows in the same order.

    Raises:
        EagleError: ``name`` is not one of ``BUILTIN_SETS``.
    """
    if name not in BUILTIN_SETS:
        raise EagleError(f"unknown built-in prompt set {name!r}: choose one of {', '.join(BUILTIN_SETS)}")
    prompts = _chat_prompts() if name == "chat" else _eval_prompts()
    ordered = _balanced_order(prompts, Random(f"{name} order"))
    return [
        {"id": f"{name}-{index:05d}", "category": category, "turns": turns}
        for index, (category, turns) in enumerate(ordered)
    ]


def _eval_prompts() -> dict[str, list[Turns]]:
    data = _read_json("eval.json")
    return {category: [_as_turns(prompt) for prompt in data[category]] for category in CATEGORIES}


def _chat_prompts() -> dict[str, list[Turns]]:
    prompts = {}
    for category in CATEGORIES:
        data = _read_json(f"chat/{category}.json")
        expanded = []
        for index, template in enumerate(data["templates"]):
            follow_ups = template.get("follow_ups", data["follow_ups"])
            expanded += [
                (text, follow_ups) for text in _expand(template, data.get("slots", {}), f"{category} {index}")
            ]
        prompts[category] = [_as_turns(seed) for seed in data["seeds"]]
        prompts[category] += _add_follow_ups(expanded, Random(f"{category} follow-ups"))
    return prompts


def _read_json(path: str) -> dict:
    return json.loads(files("stages.prompts").joinpath("data", path).read_text(encoding="utf-8"))


def _as_turns(prompt: str | Turns) -> Turns:
    return [prompt] if isinstance(prompt, str) else list(prompt)


def _balanced_order(prompts: dict[str, list[Turns]], rng: Random) -> list[tuple[str, Turns]]:
    """Shuffle each category, then spread its rows evenly over the whole list."""
    placed = []
    for category, rows in prompts.items():
        for index, turns in enumerate(_shuffled(rows, rng)):
            placed.append(((index + rng.random()) / len(rows), category, turns))
    return [(category, turns) for _, category, turns in sorted(placed)]


def _add_follow_ups(expanded: list[tuple[str, list[str | Turns]]], rng: Random) -> list[Turns]:
    rows = []
    for index, (text, follow_ups) in enumerate(_shuffled(expanded, rng)):
        chosen = index < FOLLOW_UP_SHARE * len(expanded)
        rows.append([text, *_as_turns(_shuffled(follow_ups, rng)[0])] if chosen else [text])
    return rows


def _expand(template: dict, shared_slots: dict, seed: str) -> list[str]:
    """Fill one template ``count`` times, all different."""
    rng = Random(seed)
    slots = shared_slots | template.get("slots", {})
    wordings = _deck(_as_turns(template["text"]), rng)
    decks = {key: _deck(_slot_values(slot), rng) for key, slot in slots.items() if not isinstance(slot, str)}
    texts: dict[str, None] = {}
    for _ in range(20 * template["count"]):
        values = _draw(decks)
        for key, slot in slots.items():
            if isinstance(slot, str):
                values[key] = _evaluate(ast.parse(slot, mode="eval").body, values)
        texts[_fill(next(wordings), values)] = None
        if len(texts) == template["count"]:
            return list(texts)
    raise ValueError(f"too few different fillings of template {template['text']!r}")


def _slot_values(slot: list | dict) -> list:
    return slot if isinstance(slot, list) else list(range(slot["from"], slot["to"] + 1, slot.get("step", 1)))


def _draw(decks: dict[str, Iterator]) -> dict:
    values: dict = {}
    for key, deck in decks.items():
        names, drawn = key.split(","), next(deck)
        values.update(zip(names, drawn, strict=True) if len(names) > 1 else [(key, drawn)])
    return values


def _deck(values: list, rng: Random) -> Iterator:
    """Yield the values in random order, each once before any comes again."""
    while True:
        yield from _shuffled(values, rng)


def _shuffled(values: list, rng: Random) -> list:
    """Like ``rng.shuffle``, but only ``rng.random`` is sure to stay the same in later Python versions."""
    return sorted(values, key=lambda _: rng.random())


def _fill(text: str, values: dict) -> str:
    def value(match: re.Match) -> str:
        key = match[1]
        if key in values:
            return str(values[key])
        lowered = str(values[key[0].lower() + key[1:]])
        return lowered[0].upper() + lowered[1:]

    return re.sub(r"\{([A-Za-z]\w*)\}", value, text)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _evaluate(node: ast.expr, values: dict) -> int:
    """Evaluate integer arithmetic over slot values."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            quotient, remainder = divmod(_evaluate(left, values), _evaluate(right, values))
            if remainder:
                raise ValueError(f"inexact division {ast.unparse(node)} with {values}")
            return quotient
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
    raise ValueError(f"not arithmetic over slots: {ast.unparse(node)}")
