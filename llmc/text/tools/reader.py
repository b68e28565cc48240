"""Reads text that arrives in pieces: each step waits (yields) for the text that it needs.

The result therefore does not depend on how the text is split. White space between the parts of a
literal is ignored, because models vary it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from llmc.text.tools.tool_format import ANY_ID

_ID = re.compile(r"[\w.:-]*")
_OUTSIDE = re.compile(r"""[^"'{}\[\]]*""")  # outside a JSON or Python string
_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_BARE = re.compile(r"[\w.+$-]*")
_SCALAR = re.compile(r"[^\s,\]})]*")

Steps = Generator[None, None, bool]


class Reader:
    """Buffered text. `text` from `at` on is not read yet; `cut_off` is the text of the current call
    that was read and removed from `text`."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self.ran_out = False  # whether a step wanted more than there was when the text ended
        self.cut_off: list[str] = []

    def drop(self) -> None:
        """Discard the text read so far."""
        self.text, self.at, self.cut_off = self.text[self.at :], 0, []

    def cut(self) -> None:
        """Move the text read so far out of `text`, so that the cost of a long text stays linear."""
        self.cut_off.append(self.text[: self.at])
        self.text, self.at = self.text[self.at :], 0

    def put_back(self) -> int:
        """Go back to the position of the last `drop`; returns how much had been read."""
        read = "".join(self.cut_off)
        num_read = len(read) + self.at
        self.text, self.at, self.cut_off = read + self.text, 0, []
        return num_read

    def more(self) -> Steps:
        """Wait until there is a character to read; False if the text has ended."""
        while self.at >= len(self.text):
            if self.closed:
                self.ran_out = True
                return False
            yield
        return True

    def skip_space(self) -> Generator[None, None, None]:
        while (yield from self.more()) and self.text[self.at].isspace():
            self.at += 1

    def match(self, literal: str) -> Steps:
        for letter in literal:
            if letter.isspace():
                continue
            yield from self.skip_space()
            if letter == ANY_ID:
                yield from self.run(_ID)
            elif self.text.startswith(letter, self.at):
                self.at += 1
            else:
                return False
        return True

    def comes(self, literal: str, *, read: bool = True) -> Steps:
        """Whether `literal` comes next. It is consumed if so, unless `read` is False."""
        at = self.at
        found = yield from self.match(literal)
        if not (found and read):
            self.at = at
        return found

    def skip(self, literal: str) -> Generator[None, None, None]:
        """Read `literal` if it comes next, even if the text ends inside it."""
        at = self.at
        if not (yield from self.match(literal)) and self.at < len(self.text):
            self.at = at

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """The longest run of characters that `pattern` allows."""
        parts = []
        while (yield from self.more()):
            found = pattern.match(self.text, self.at)
            assert found is not None, "these patterns match the empty string"
            parts.append(found[0])
            self.at = found.end()
            if self.at < len(self.text):
                break
        return "".join(parts)

    def until(self, literal: str) -> Generator[None, None, str | None]:
        """The text before `literal`, which is read too; None if it does not occur."""
        wanted = literal.strip()
        parts: list[str] = []
        while True:
            found = self.text.find(wanted, self.at)
            if found >= 0:
                parts.append(self.text[self.at : found])
                self.at = found + len(wanted)
                return "".join(parts)
            if self.closed:
                self.ran_out = True
                return None
            safe = max(self.at, len(self.text) - len(wanted) + 1)
            parts.append(self.text[self.at : safe])
            self.at = safe
            self.cut()
            yield

    def value(self, emit: Callable[[str], None] | None = None) -> Generator[None, None, str]:
        """The text of a JSON or Python value, "" if none starts here. An object is also passed to
        `emit` piece by piece."""
        yield from self.skip_space()
        if not (yield from self.more()):
            return ""
        first = self.text[self.at]
        if first not in "{[\"'":
            return (yield from self.run(_SCALAR))
        parts: list[str] = []
        depth, quote = 0, ""
        while (yield from self.more()):
            found = _INSIDE.get(quote, _OUTSIDE).match(self.text, self.at)
            assert found is not None, "these patterns match the empty string"
            begin, self.at = self.at, found.end()
            letter = self.text[self.at : self.at + 1]
            if letter:
                self.at += 1
            if letter == "\\":
                yield from self.more()
                self.at = min(self.at + 1, len(self.text))  # an escaped character
            elif letter in ('"', "'"):
                quote = "" if quote else letter
            elif letter:
                depth += 1 if letter in "{[" else -1
            parts.append(self.text[begin : self.at])
            if emit is not None and first == "{":
                emit(parts[-1])
            if letter and not quote and depth <= 0:
                break
            if self.at >= len(self.text):
                self.cut()
        return "".join(parts)

    def quoted_value(self, quote: str) -> Generator[None, None, str]:
        """A value with the model's own quotes around strings and none around keys, converted to
        JSON; "" if none starts here."""
        yield from self.skip_space()
        parts: list[str] = []
        depth = 0
        while (yield from self.more()):
            if (yield from self.comes(quote)):
                text = yield from self.until(quote)
                if text is None:
                    return ""
                parts.append(json.dumps(text, ensure_ascii=False))
            elif self.text[self.at] == '"':
                parts.append((yield from self.value()))
            elif self.text[self.at] in "{[}],:":
                letter = self.text[self.at]
                if depth == 0 and letter not in "{[":
                    break
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
                self.at += 1
                if letter == ":" and parts and not parts[-1].startswith('"'):
                    parts[-1] = json.dumps(parts[-1].strip(), ensure_ascii=False)
                parts.append(letter)
            else:
                parts.append((yield from self.run(_BARE)) or self._letter())
            if depth == 0:
                break
            yield from self.skip_space()
        return "".join(parts)

    def _letter(self) -> str:
        self.at += 1
        return self.text[self.at - 1]
