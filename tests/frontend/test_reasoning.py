"""Reasoning: the marks learned from a template, and answers split by them however they are cut."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_templates import STYLES
from scripted_engine import CHAT_TEMPLATE, make_hf_tokenizer
from tool_templates import STYLES as TOOL_STYLES

from llmc.errors import InvalidRequestError
from llmc.text.chat import reasoning_format, render_chat
from llmc.text.reasoning import Reasoning, ReasoningParser, find_reasoning
from llmc.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "1 + 1?"}


@cache
def tokenizer_of(style: str) -> Tokenizer:
    kind = STYLES[style]
    hf = make_hf_tokenizer(kind.template, kind.special_tokens)
    hf.add_tokens(list(kind.added_tokens))
    return Tokenizer(hf)


def found(style: str, **options: Any) -> Reasoning | None:
    tokenizer = tokenizer_of(style)
    kwargs = {"enable_thinking": STYLES[style].thinking}
    ids = render_chat(tokenizer, [USER], **{"template_kwargs": kwargs, **options})
    return find_reasoning(STYLES[style].form, tokenizer, ids)


def split(reasoning: Reasoning, *pieces: str) -> tuple[str, str]:
    parser = ReasoningParser(reasoning)
    both = [*map(parser.push, pieces), parser.finish()]
    return "".join(one for one, _ in both), "".join(one for _, one in both)


def of(style: str) -> Reasoning:
    reasoning = found(style)
    assert reasoning is not None
    return reasoning


@pytest.mark.parametrize("style", STYLES)
def test_the_marks_are_learned(style: str) -> None:
    learned, form = reasoning_format(tokenizer_of(style)), STYLES[style].form
    assert learned is not None and (learned.key is None) == (form.key is None)
    # Newer transformers give a template all names of the field.
    assert dataclasses.replace(learned, key=form.key) == form


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, *(style.template for style in TOOL_STYLES.values())]
)
def test_other_templates_have_none(template: str) -> None:
    assert reasoning_format(Tokenizer(make_hf_tokenizer(template))) is None


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_an_answer_is_split_however_it_is_cut(style: str, data: st.DataObject) -> None:
    text = STYLES[style].answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(of(style), *pieces) == ("Hm, 2.", "Two")


@pytest.mark.parametrize("style", STYLES)
def test_text_without_marks(style: str) -> None:
    is_inside = "opens" in style
    said = split(of(style), " <", "no mark> ")
    assert said == (("<no mark>", "") if is_inside else ("", " <no mark> "))


def test_what_is_cut_inside_the_reasoning_is_all_reasoning() -> None:
    assert split(of("tags"), "<think>\nHm, </thi") == ("Hm, </thi", "")


def test_a_prompt_that_ends_the_reasoning() -> None:
    assert found("tags", template_kwargs={"enable_thinking": False}) is None


def test_a_continued_message_says_whether_it_reasons() -> None:
    form, tokenizer = STYLES["tags"].form, tokenizer_of("tags")
    begun = find_reasoning(form, tokenizer, [], {"role": "assistant", "content": "<think>So"})
    assert begun is not None and begun.starts == "inside"
    ended = {"role": "assistant", "content": [{"type": "text", "text": "<think>So</think>A"}]}
    assert find_reasoning(form, tokenizer, [], ended) is None


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("style", ["tags", "channels", "the prompt opens"])
def test_reasoning_of_the_history_reaches_the_template(style: str, key: str) -> None:
    tokenizer = tokenizer_of(style)
    answer = {"role": "assistant", "content": "Two", key: "Hm, 2."}
    ids = render_chat(tokenizer, [USER, answer, USER])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert ("Hm, 2." in text) == (STYLES[style].form.key is not None) and "Two<|end|>" in text
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.{key} must be text"):
        render_chat(tokenizer, [{**answer, key: 1}])
