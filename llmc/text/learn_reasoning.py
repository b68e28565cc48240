"""A chat template -> the ReasoningFormat that it writes, or None where it has none.

A conversation whose answer has made-up reasoning is rendered, and what stands around that is the
format. Of templates that only take reasoning out of the history the marks are those of the empty
reasoning that ends a prompt without thinking; or the template names them: both are in its text or
in the vocabulary, or the prompt ends with one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmc.text.reasoning import ReasoningFormat

# (messages, add_generation_prompt, enable_thinking) -> text; None when the template refuses them.
Render = Callable[[Sequence[Mapping[str, Any]], bool, bool | None], str | None]

KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, by different templates
USER, THOUGHT, ANSWER = "zuserz", "zthoughtz", "zanswerz"
_MARK = r"<[^<>\s]+>|\[[^\[\]\s]+\]|\u25c1[^\u25c1\u25b7\s]+\u25b7"
_NAMED = re.compile(
    r"([<\[\u25c1])/?([\w:|]*(?:think|thought|reason)\w*)([>\]\u25b7])", re.IGNORECASE
)


def learn_reasoning(
    render: Render, template: str, added_tokens: Collection[str]
) -> ReasoningFormat | None:
    """`added_tokens`: those of the vocabulary that stand for marks."""
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
    """From what the template writes around the reasoning of the field `key`."""
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
    if not begin and before:  # the prompt has it already
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
    """From what a prompt without thinking has at its end, and one with thinking has not."""
    if thinking is None or not_thinking is None:
        return None
    ends = [text[text.rfind(USER) :] for text in (thinking, not_thinking)]
    empty = ends[1].removeprefix(ends[0]).strip()
    marks = find_marks(empty)
    if not ends[1].startswith(ends[0]) or len(marks) < 2 or not empty.endswith(marks[-1]):
        return None
    return ReasoningFormat(begin=empty.removesuffix(marks[-1]).strip(), end=marks[-1])


def _named(template: str, prompt: str, added_tokens: Collection[str]) -> ReasoningFormat | None:
    """From the first pair of marks that the template names, both known."""
    for opening, name, closing in _NAMED.findall(template):
        begin, end = f"{opening}{name}{closing}", f"{opening}/{name}{closing}"
        known = (mark in template or mark in added_tokens for mark in (begin, end))
        if all(known) or (prompt.rstrip().endswith(begin)):
            return ReasoningFormat(begin=begin, end=end)
    return None
