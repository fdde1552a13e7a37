"""The calls of tools in an answer's text, read as it comes: content is passed on, calls are taken out.

What looks like a call and is none (broken JSON, a function that does not exist) stays content. From where the
arguments of a known function begin, it is a call, whatever follows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from stages.serve.stop_strings import overlap
from stages.serve.tool_form import ToolForm

SPACE = " \t\r\n"
BETWEEN = SPACE + ",;"
NAME_LIMIT = 128  # characters that are held back because they may be the name of a function


@dataclass
class Call:
    """A call so far. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class CallDelta:
    """What has come of the call at `index`: first its id and name, then pieces of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class ToolCallReader:
    """Divides one answer's text. The division depends on the text alone, not on its pieces.

    Args:
        names: functions that may be called.
        one: whether the answer is over after its first call.
        only: whether there is nothing but calls, so that no text is content.

    Attributes:
        calls: those found so far.
        done: whether the answer is over.
    """

    def __init__(
        self, form: ToolForm, names: Collection[str], *, one: bool = False, only: bool = False
    ) -> None:
        self._form = form
        self._names = names
        self._one, self._only = one, only
        self._text = ""  # not divided yet
        self._raw = ""  # what belongs to a call that is not certain yet
        self._scanner: CallScanner | None = None
        self._inside = False  # between the markers
        self._plain = False  # nothing that comes can be a call
        self._deltas: list[CallDelta] = []
        self.calls: list[Call] = []
        self.done = False

    def push(self, text: str) -> str:
        """Takes the next piece; returns the content in it that is certain."""
        self._text += text
        content = ""
        while not self.done and (piece := self._divide()) is not None:
            content += piece
        return "" if self._only else content

    def close(self) -> str:
        """Returns what was held back: the answer has ended."""
        held = self._raw + self._text
        in_call = self._scanner is not None and self._scanner.certain(self._names)
        if self._only or self.done or in_call or (self.calls and not held.strip(BETWEEN + self._form.end)):
            held = ""
        self._raw = self._text = ""
        return held

    def drain(self) -> list[CallDelta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _divide(self) -> str | None:
        """One step: content that it makes certain, or None where more text is needed."""
        if self._scanner is not None:
            return self._scan(self._scanner)
        if self._plain:
            return self._take(len(self._text)) or None
        return self._open() if self._inside else self._outside()

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _outside(self) -> str | None:
        """Pass content on, up to where calls begin."""
        begin = self._form.begin
        if not begin:  # the answer is a call from its start, or none
            if not self._text.strip(SPACE):
                return None
            self._inside = True
            return ""
        at = self._text.find(begin)
        if at >= 0:
            before = self._take(at)
            content = before.rstrip(SPACE)
            self._raw = before[len(content) :] + self._take(len(begin))  # what separates a call from the text
            self._inside = True
            return content
        certain = self._text[: len(self._text) - overlap(self._text, begin)]
        return self._take(len(certain.rstrip(SPACE))) or None

    def _open(self) -> str | None:
        """Between the markers: another call, or the end of them."""
        stripped = self._text.lstrip(BETWEEN + "[" * (self._form.kind == "listed"))
        if not stripped:
            return None
        end = self._form.end
        if self.calls and end and stripped.startswith(end[: len(stripped)]):
            if len(stripped) < len(end):
                return None
            self._text = stripped[len(end) :]
            self._raw, self._inside = "", False
            return ""
        if stripped[0] == "{":
            self._raw += self._take(len(self._text) - len(stripped))
            self._scanner = CallScanner(self._form.key)
            return ""
        return self._open_named(stripped) if self._form.kind == "named" else self._give_up()

    def _open_named(self, stripped: str) -> str | None:
        """`name[ARGS]{` or `name{`."""
        name, brace, _ = stripped.partition("{")
        if not brace and len(name) <= NAME_LIMIT:
            return None
        known = re.fullmatch(r"([\w.-]+)\s*(\[ARGS\])?\s*", name)
        if not brace or not known or known[1] not in self._names:
            return self._give_up()
        self._raw += self._take(len(self._text) - len(stripped) + len(name))
        self._scanner = CallScanner(self._form.key, name=known[1])
        return ""

    def _give_up(self) -> str:
        """What has been held back is content."""
        held, self._raw = self._raw, ""
        self._inside = False
        if not self._form.begin:
            self._plain = True
        return held

    def _scan(self, scanner: CallScanner) -> str | None:
        """Read on in a call."""
        if not self._text:
            return None
        used = 0
        while used < len(self._text) and not (scanner.broken or scanner.ended):
            scanner.push(self._text[used])
            used += 1
        self._raw += self._take(used)
        if not scanner.certain(self._names):
            if not (scanner.broken or scanner.ended):
                return ""
            self._scanner = None
            return self._give_up()
        self._emit(scanner)
        if scanner.broken or scanner.ended:
            self._scanner = None
            self._raw = ""
            self._inside = self._form.kind != "named"
            self.done = self._one
        return ""

    def _emit(self, scanner: CallScanner) -> None:
        """Tell what is new of a call."""
        assert scanner.name is not None
        if not scanner.told:
            scanner.told = True
            self.calls.append(Call(self._new_id(), scanner.name))
            self._deltas.append(CallDelta(len(self.calls) - 1, self.calls[-1].id, scanner.name, ""))
        call = self.calls[-1]
        more = scanner.arguments[len(call.arguments) :]
        if more:
            call.arguments += more
            self._deltas.append(CallDelta(len(self.calls) - 1, None, None, more))

    def _new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits, and no others."""
        if self._form.kind in ("listed", "named"):
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


class CallScanner:
    """Reads one object, {"name": ..., "arguments": {...}} in any order, character by character.

    Args:
        key: the arguments' name; `arguments` and `parameters` are both understood where it differs.
        name: the function, where the object is its arguments alone.

    Attributes:
        arguments: their text so far.
        ended, broken: whether the object is complete, and whether it cannot be one.
        told: for whoever follows it.
    """

    def __init__(self, key: str, *, name: str | None = None) -> None:
        self._keys = {key, "arguments", "parameters"}
        self._alone = name is not None
        self.name = name
        self.arguments = ""
        self.ended = self.broken = self.told = False
        self._awaits = "value" if self._alone else "{"
        self._key = ""
        self._value = ""
        self._depth = 0
        self._quoted = self._escaped = False

    def certain(self, names: Collection[str]) -> bool:
        """Whether this is a call of one of the functions."""
        return self.name in names and bool(self.arguments)

    def push(self, char: str) -> None:
        """Takes the next character."""
        if self._awaits == "rest":
            self._in_value(char)
        elif char in SPACE:
            return
        elif self._awaits == "value":
            self._awaits = "rest"
            self._value = ""
            self._in_value(char)
        elif self._awaits == "key" and char == '"':
            self._awaits, self._value, self._key = "rest", "", ""
            self._in_value(char)
        elif char == self._awaits:
            self._awaits = {"{": "key", ":": "value"}[char]
        elif char == "," and self._awaits == "next":
            self._awaits = "key"
        elif char == "}" and self._awaits == "next":
            self._end()
        else:
            self.broken = True

    def _in_value(self, char: str) -> None:
        """A character of a string, number, object or list."""
        if not self._quoted and self._depth == 0 and self._value and char in ",}" + SPACE:
            self._value_ended()  # of a number or a word
            if not self.broken and not self.ended:
                self.push(char)
            return
        self._value += char
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if (self._alone or self._key in self._keys) and self._value[0] == "{":
            self.arguments += char
        if self._depth < 0:
            self.broken = True
        elif self._depth == 0 and not self._quoted and char in '"}]':
            self._value_ended()

    def _value_ended(self) -> None:
        value, key = self._value, self._key
        self._value = ""
        if self._alone:
            self.ended = True
            return
        if not key:  # it was a key itself
            self._key = self._text(value) or ""
            self._awaits = ":"
            self.broken = not self._key or (self._key in self._keys and bool(self.arguments))
            return
        self._key, self._awaits = "", "next"
        if key == "name":
            self.name = self._text(value)
            self.broken = self.name is None
        elif key in self._keys and not value.startswith("{"):
            # Some models write the arguments as text, or leave them empty.
            self.arguments = "{}" if value == "null" else self._text(value) or ""
            self.broken = not self.arguments.lstrip().startswith("{")

    def _end(self) -> None:
        self.ended = True
        self.arguments = self.arguments or "{}"

    @staticmethod
    def _text(value: str) -> str | None:
        try:
            found = json.loads(value, strict=False)
        except ValueError:
            return None
        return found if isinstance(found, str) else None
