"""Reasoning over HTTP: split from the content, in streams too, and before a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from reasoning_templates import STYLES
from scripted_engine import make_scripted

CHAT = "/v1/chat/completions"
STYLE = STYLES["the prompt opens"]  # its marks are special tokens
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 100}


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted(chat_template=STYLE.template, special_tokens=STYLE.special_tokens)
    scripted.runner.scripts = {"1 + 1?": STYLE.answer}
    with live_server(over=scripted) as live:
        yield live


def joined(events: list[dict[str, Any]], field: str) -> str:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


def test_a_whole_answer(live: Live) -> None:
    answer = live.post(CHAT, SAY).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, 2.", "Two")
    said = live.scripted.tokenizer.encode("Hm, 2.\n</think>")
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(said)}


@pytest.mark.parametrize("shows", [True, False])
def test_a_stream(shows: bool, live: Live) -> None:
    options = {"include_usage": True}
    body = {**SAY, "n": 2, "include_reasoning": shows, "stream_options": options}
    events = live.events(CHAT, body)
    usage = events.pop()["usage"]
    for index in range(2):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        assert joined(mine, "reasoning_content") == ("Hm, 2." if shows else "")
        assert joined(mine, "content") == "Two"
        assert mine[-1]["choices"][0]["finish_reason"] == "stop"
    one = live.post(CHAT, SAY).json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * one


def test_it_can_be_left_out(live: Live) -> None:
    answer = live.post(CHAT, {**SAY, "include_reasoning": False}).json()
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"] == "Two"


def test_an_answer_that_ends_inside_it(live: Live) -> None:
    [choice] = live.post(CHAT, {**SAY, "max_tokens": 4}).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "Hm,"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_the_template_is_told_whether_to_think(
    fields: dict[str, Any], thinks: bool, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = live.scripted.tokenizer
    told = "{{ messages[0].content }}{% if enable_thinking is false %} at once{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", told)
    body = {**SAY, **fields, "return_token_ids": True}
    prompt = tokenizer.decode(live.post(CHAT, body).json()["prompt_token_ids"])
    assert ("at once" not in prompt) is thinks
