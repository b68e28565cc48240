"""Learns the ReasoningFormat that a chat template writes, or None if it has none.

Renders a conversation whose answer has made-up reasoning; the text around that is the format. Some
templates only strip reasoning from the history. Their marks are those of the empty reasoning at the
end of a prompt without thinking, or are named in the template: both are in its text or in the
vocabulary, or the prompt ends with the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmc.text.reasoning import ReasoningFormat

# (messages, add_generation_prompt, enable_thinking) -> text; None if the template rejects them.
Render = Callable[[Sequence[Mapping[str, Any]], bool, bool | None], str | None]

KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, in different templates
USER, THOUGHT, ANSWER = "zuserz", "zthoughtz", "zanswerz"
_MARK = r"<[^<>\s]+>|\[[^\[\]\s]+\]|\u25c1[^\u25c1\u25b7\s]+\u25b7"
_NAMED = re.compile(
    r"([<\[\u25c1])/?([\w:|]*(?:think|thought|reason)\w*)([>\]\u25b7])", re.IGNORECASE
)


def learn_reasoning(
    render: Render, template: str, added_tokens: Collection[str]
) -> ReasoningFormat | None:
    """Learn the format of a template. `added_tokens`: the vocabulary's tokens that can be marks."""
    question = [{"role": "user", "content": USER}]
    prompt = render(question, True, None)
    if prompt is None:
        return None
    marks = "|".join((*map(re.escape, sorted(added_tokens, key=len, reverse=True)), _MARK))
    find_marks = re.compile(marks).findall
    for key in KEYS:
        found = _written(render, prompt, key, find_marks)
        if found is not None:
            return found
    emptied = _emptied(render(question, True, True), render(question, True, False), find_marks)
    return emptied or _named(template, prompt, added_tokens)


def _written(
    render: Render, prompt: str, key: str, find_marks: Callable[[str], list[str]]
) -> ReasoningFormat | None:
    """The format, from the text that the template writes around the reasoning in field `key`."""
    answer = {"role": "assistant", "content": ANSWER, key: THOUGHT}
    text = render([{"role": "user", "content": USER}, answer], False, None)
    if text is None:
        return None
    at = text.rfind(THOUGHT)
    after = text.find(ANSWER, at)
    if at < 0 or after < 0:
        return None
    same = 0
    while same < min(len(prompt), at) and prompt[same] == text[same]:
        same += 1
    begin = text[same:at].strip()
    before = find_marks(text[:at])
    if not begin and before:  # the prompt already ends with it
        begin = before[-1] if text[:at].rstrip().endswith(before[-1]) else ""
    between = text[at + len(THOUGHT) : after].strip()
    end = next(iter(find_marks(between)), "")
    if not find_marks(begin) or not end or not between.startswith(end):
        return None
    return ReasoningFormat(
        begin=begin, end=end, answer_begin=between.removeprefix(end).strip(), key=key
    )


def _emptied(
    thinking: str | None, not_thinking: str | None, find_marks: Callable[[str], list[str]]
) -> ReasoningFormat | None:
    """The format, from the end of a prompt without thinking that one with thinking lacks."""
    if thinking is None or not_thinking is None:
        return None
    ends = [text[text.rfind(USER) :] for text in (thinking, not_thinking)]
    empty = ends[1].removeprefix(ends[0]).strip()
    marks = find_marks(empty)
    if not ends[1].startswith(ends[0]) or len(marks) < 2 or not empty.endswith(marks[-1]):
        return None
    return ReasoningFormat(begin=empty.removesuffix(marks[-1]).strip(), end=marks[-1])


def _named(template: str, prompt: str, added_tokens: Collection[str]) -> ReasoningFormat | None:
    """The format, from the first pair of marks in the template that are both known."""
    for opening, name, closing in _NAMED.findall(template):
        begin, end = f"{opening}{name}{closing}", f"{opening}/{name}{closing}"
        known = (mark in template or mark in added_tokens for mark in (begin, end))
        if all(known) or (prompt.rstrip().endswith(begin)):
            return ReasoningFormat(begin=begin, end=end)
    return None
