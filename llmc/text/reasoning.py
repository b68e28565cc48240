"""`ReasoningFormat`: how one model marks its reasoning; learned by learn_reasoning.py.

begin REASONING end answer_begin ANSWER          the prompt may already end with `begin`
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmc.errors import InvalidRequestError
from llmc.text.partial import partial_length
from llmc.text.tokenizer import Tokenizer

TAIL_TOKENS = 64  # at the end of a prompt, searched for the last mark
_SPACE = r"/\s{0,8}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Marks without the white space around them."""

    begin: str
    end: str
    answer_begin: str = ""  # what the template writes between `end` and the answer
    key: str | None = None  # the field of a message whose reasoning the template writes

    def marks(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The vocabulary's added tokens that occur in the marks, with their ids."""
        whole = "\n".join((self.begin, self.end, self.answer_begin))
        return {text: i for text, i in tokenizer.added_tokens.items() if text in whole}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning of one answer: its marks, and whether the prompt already opened it."""

    form: ReasoningFormat
    starts: Literal["inside", "before"]
    marks: Mapping[str, int]

    def preamble(self, max_tokens: int | None = None) -> str:
        """The Lark grammar of the reasoning before an answer; `@answer` is the answer's grammar.

        `max_tokens`: limit of the reasoning, at which its end is forced. InvalidRequestError if
        that is impossible because the marks are not single tokens.
        """
        form, rules = self.form, []
        if max_tokens is not None:
            self._check_limit()
        if form.end in self.marks:
            thoughts = f"thoughts {self._literal(form.end)}"
            limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
            rules.append(f"thoughts{limit}: /(?s:.*)/")
        else:
            thoughts = "thoughts"
            rules.append(f"thoughts[suffix={json.dumps(form.end)}]: /(?s:.*)/")
        parts = [thoughts, _SPACE]
        if form.answer_begin:
            parts.append(f"({self._literal(form.answer_begin)} {_SPACE})?")
        if self.starts == "inside":
            return "\n".join((f"start: {' '.join(parts)} @answer", *rules, ""))
        begin = self._literal(form.begin)
        return "\n".join((f"start: ({begin} {' '.join(parts)})? @answer", *rules, ""))

    def free_answer(self) -> str:
        """The Lark grammar of any answer after a preamble with a limit; it can't start reasoning
        again."""
        self._check_limit()
        banned = "*" if self.starts == "inside" else f"^{self.marks[self.form.begin]}"
        return f"start: <[{banned}]>*\n"

    def _check_limit(self) -> None:
        needed = {self.form.end} if self.starts == "inside" else {self.form.begin, self.form.end}
        if not needed <= self.marks.keys():
            raise InvalidRequestError(
                "thinking_token_budget needs a model whose reasoning marks are single tokens; "
                f"this one's are {self.form.begin!r} and {self.form.end!r}; leave it out",
                param="thinking_token_budget",
            )

    def num_tokens(self, token_ids: Sequence[int], reasoning: str, tokenizer: Tokenizer) -> int:
        """How many of an answer's tokens are `reasoning`, including marks that are tokens."""
        if not reasoning:
            return 0
        end = self.marks.get(self.form.end)
        if end is None:
            return len(tokenizer.encode(reasoning, add_special_tokens=False))
        return token_ids.index(end) + 1 if end in token_ids else len(token_ids)

    def _literal(self, text: str) -> str:
        """A mark as a sequence of strings and tokens."""
        if not self.marks:
            return json.dumps(text, ensure_ascii=False)
        longest_first = sorted(map(re.escape, self.marks), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text)
        return " ".join(
            f"<[{self.marks[part]}]>" if part in self.marks else json.dumps(part)
            for part in parts
            if part
        )


def find_reasoning(
    form: ReasoningFormat,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    continued: Mapping[str, Any] | None = None,
) -> Reasoning | None:
    """The reasoning of the answer; None if the prompt already closes it. `continued`: the message
    that the answer continues."""
    if continued is not None:
        text = continued.get("content")
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        has_ended = form.end in text
        has_begun = form.begin in text
    else:
        tail = tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        closed = (form.end, form.answer_begin) if form.answer_begin else (form.end,)
        has_ended, has_begun = tail.endswith(closed), tail.endswith(form.begin)
    if has_ended:
        return None
    starts: Literal["inside", "before"] = "inside" if has_begun else "before"
    return Reasoning(form=form, starts=starts, marks=form.marks(tokenizer))


class ReasoningParser:
    """Splits the text of one answer, which arrives in pieces, into reasoning and the rest."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._form = reasoning.form
        self._is_inside = reasoning.starts == "inside"
        self._text = ""
        self._is_over = False  # whether the text has ended
        self._found: list[tuple[str, str]] = []
        self._steps = self._split()

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, rest) that `text` completed."""
        self._text += text
        return self._advance()

    def finish(self) -> tuple[str, str]:
        """Flush at the end of the text."""
        self._is_over = True
        return self._advance()

    def _advance(self) -> tuple[str, str]:
        next(self._steps, None)
        found, self._found = self._found, []
        return "".join(one for one, _ in found), "".join(one for _, one in found)

    def _split(self) -> Generator[None, None, None]:
        # Models may repeat the mark that the prompt already contains.
        has_mark = yield from self._skip(self._form.begin)
        if has_mark or self._is_inside:
            yield from self._skip_space()
            yield from self._reasoning()
            yield from self._skip_space()
            if self._form.answer_begin and (yield from self._skip(self._form.answer_begin)):
                yield from self._skip_space()
        while True:
            self._found.append(("", self._text))
            self._text = ""
            yield

    def _reasoning(self) -> Generator[None, None, None]:
        """Read up to the end mark. White space before it is dropped, so it is held back."""
        end = self._form.end
        while (at := self._text.find(end)) < 0:
            keep = 0 if self._is_over else partial_length(end, self._text)
            ready = self._text[: len(self._text) - keep].rstrip()
            self._found.append((ready, ""))
            self._text = self._text[len(ready) :]
            if self._is_over:
                self._text = ""
                return
            yield
        self._found.append((self._text[:at].rstrip(), ""))
        self._text = self._text[at + len(end) :]

    def _skip(self, mark: str) -> Generator[None, None, bool]:
        """Read white space and `mark` if they come next; otherwise nothing."""
        while not self._is_over and mark.startswith(self._text.lstrip()[: len(mark)]):
            if self._text.lstrip().startswith(mark):
                break
            yield
        rest = self._text.lstrip()
        found = rest.startswith(mark)
        if found:
            self._text = rest[len(mark) :]
        return found

    def _skip_space(self) -> Iterator[None]:
        while not (rest := self._text.lstrip()) and not self._is_over:
            self._text = ""
            yield
        self._text = rest
