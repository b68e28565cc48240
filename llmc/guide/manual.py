"""Reads the manual: questions with their phrasings and one answer each, from `manual_*.md`.

    # Chapter                    ## And what is the default?     a question that leans on the last
    Running text.
                                 - phrasing
    ## Question                  - phrasing
    Answer.
    - phrasing                   | after | answer |
                                 |---|---|
                                 | Question | answer after that question |

One phrasing of each question, drawn by its checksum, is never trained on; it measures what the
model understands.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One answer and the ways to ask for it; `question` is the first of `phrasings`."""

    question: str
    answer: str
    phrasings: tuple[str, ...]
    held_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """A question whose answer depends on the one before it: `answers[question before]`."""

    question: str
    answers: dict[str, str]
    phrasings: tuple[str, ...]
    held_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    entries: tuple[Entry, ...]
    follow_ups: tuple[FollowUp, ...]
    chapters: tuple[tuple[str, ...], ...]  # running text: the opening of a chapter, its answers

    @property
    def held_out(self) -> frozenset[str]:
        """The phrasings that are never trained on, in normal form."""
        entries = {normal_form(entry.held_out) for entry in self.entries}
        return frozenset(entries | {normal_form(each.held_out) for each in self.follow_ups})

    def entry(self, question: str) -> Entry:
        """The entry with this heading; KeyError when the manual has none."""
        for entry in self.entries:
            if entry.question == question:
                return entry
        raise KeyError(f"no question {question!r} in the manual")


def normal_form(question: str) -> str:
    """Two questions with one normal form count as the same."""
    return question.lower().rstrip("?.! ")


def load_manual(folder: Path = HERE) -> Manual:
    """Parse every `manual_*.md` of the folder, in the order of their names."""
    entries: list[Entry] = []
    follow_ups: list[FollowUp] = []
    chapters: list[tuple[str, ...]] = []
    for path in sorted(folder.glob("manual_*.md")):
        opening, *sections = path.read_text(encoding="utf-8").split("\n## ")
        text = [" ".join(line for line in opening.splitlines()[1:] if line)]
        for section in sections:
            parsed = _parse_section(section, path)
            if isinstance(parsed, Entry):
                entries.append(parsed)
                text.append(parsed.answer)
            else:
                follow_ups.append(parsed)
        chapters.append(tuple(text))
    manual = Manual(entries=tuple(entries), follow_ups=tuple(follow_ups), chapters=tuple(chapters))
    _check(manual)
    return manual


def _parse_section(section: str, path: Path) -> Entry | FollowUp:
    question, *lines = section.strip().splitlines()
    phrasings = [line[2:] for line in lines if line.startswith("- ")]
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    answer = [line for line in lines if line and not line.startswith(("- ", "|"))]
    if len(phrasings) < 2 or bool(rows) == bool(answer) or len(answer) > 1:
        raise ValueError(
            f"{path.name}: {question!r} needs one answer line or one table, and two phrasings"
        )
    held_out = phrasings.pop(zlib.crc32(question.encode()) % len(phrasings))
    asked = (question, *phrasings)
    if not rows:
        return Entry(question=question, answer=answer[0], phrasings=asked, held_out=held_out)
    answers = {after.strip(): then.strip() for after, then in rows[2:]}  # below the two head lines
    return FollowUp(question=question, answers=answers, phrasings=asked, held_out=held_out)


def _check(manual: Manual) -> None:
    """No phrasing may stand twice, and follow-ups must lean on questions that exist."""
    seen: dict[str, str] = {}
    sections: Sequence[Entry | FollowUp] = (*manual.entries, *manual.follow_ups)
    for section in sections:
        for phrasing in (*section.phrasings, section.held_out):
            key = normal_form(phrasing)
            if key in seen:
                raise ValueError(
                    f"{phrasing!r} is asked by {seen[key]!r} and by {section.question!r}"
                )
            seen[key] = section.question
    for follow_up in manual.follow_ups:
        for question in follow_up.answers:
            manual.entry(question)
