"""Tools over HTTP: what a request may say of them, and how calls are written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import make_scripted
from tool_templates import ARGUMENTS, STYLES, TOOLS

CHAT = "/v1/chat/completions"
STYLE = STYLES["name then json"]  # its markers are special tokens
USER = {"role": "user", "content": "call"}
SAY = {"messages": [USER], "tools": TOOLS, "max_tokens": 400}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted(
        chat_template=STYLE.template,
        special_tokens=STYLE.special_tokens,
        max_model_len=2048,
        num_blocks=512,
        blocks_per_request=128,
    )
    scripted.runner.scripts = {
        "broken": "Hm.<|calls|><|call|>nobody<|sep|>{}",
        "forty-two": "42<|turn|>",
        "call": STYLE.answer,
    }
    with live_server(over=scripted) as live:
        yield live


def assembled(
    events: list[dict[str, Any]], index: int = 0
) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and reason of one choice, put together as clients do."""
    content, calls, reason = "", [], ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    text = call["function"]["arguments"]
                    calls[call["index"]]["function"]["arguments"] += text
            assert not reason, "nothing follows the finish_reason"
            reason = choice["finish_reason"] or ""
    return content, calls, reason


def test_calls_of_a_whole_answer(live: Live) -> None:
    answer = live.post(CHAT, {**SAY, "n": 2}).json()
    ids = set()
    for choice in answer["choices"]:
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me see.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == [
            "weather",
            "time-now",
        ]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        ids |= {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 4 and all(one.startswith("call_") for one in ids)


@pytest.mark.parametrize("n", [1, 2])
def test_calls_of_a_stream(n: int, live: Live) -> None:
    body = {**SAY, "n": n, "stream_options": {"include_usage": True}}
    events = live.events(CHAT, body)
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] > n * 50
    for index in range(n):
        content, calls, reason = assembled(events, index)
        assert (content, reason) == ("Let me see.", "tool_calls")
        assert json.loads(calls[0]["function"]["arguments"]) == ARGUMENTS
        assert calls[1]["function"] == {"name": "time-now", "arguments": "{}"}


def test_log_probabilities_and_ids_come_with_calls(live: Live) -> None:
    body = {**SAY, "logprobs": True, "return_token_ids": True}
    [choice] = live.post(CHAT, body).json()["choices"]
    events = live.events(CHAT, body)
    ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    logprobs = [
        e["choices"][0]["logprobs"]["content"] for e in events if e["choices"][0]["logprobs"]
    ]
    assert ids == choice["token_ids"]
    assert sum(logprobs, []) == choice["logprobs"]["content"]


def test_what_is_no_call_stays_content(live: Live) -> None:
    body = {**SAY, "messages": [{"role": "user", "content": "broken"}]}
    [choice] = live.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] == "Hm.<|calls|><|call|>nobody<|sep|>{}"
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    assert assembled(live.events(CHAT, body)) == (choice["message"]["content"], [], "stop")


def test_other_special_tokens_stay_hidden(live: Live) -> None:
    body = {**SAY, "messages": [{"role": "user", "content": "forty-two"}]}
    assert live.post(CHAT, body).json()["choices"][0]["message"]["content"] == "42"


def test_a_call_that_max_tokens_cuts(live: Live) -> None:
    begun = 0
    for most in range(1, 60):
        body = {**SAY, "max_tokens": most}
        [choice] = live.post(CHAT, body).json()["choices"]
        message, called = choice["message"], choice["message"].get("tool_calls", [])
        content, calls, reason = assembled(live.events(CHAT, body))
        assert (reason, choice["finish_reason"]) == ("length", "length")
        assert content == (message["content"] or "") and "<|" not in content
        assert [one["function"] for one in called] == [one["function"] for one in calls]
        if called and (arguments := called[-1]["function"]["arguments"]) != "{}":
            assert called[-1]["function"]["name"] == "weather" and message["content"] == content
            begun += '"city"' in arguments and not arguments.endswith("}")
    assert begun > 5, "some limits cut the arguments"


def test_one_call_where_parallel_ones_are_not_wanted(live: Live) -> None:
    body = {**SAY, "parallel_tool_calls": False}
    [choice] = live.post(CHAT, body).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert len(assembled(live.events(CHAT, body))[1]) == 1


def test_no_tools_are_told_or_read_with_choice_none(live: Live) -> None:
    with_tools = live.post(CHAT, {**SAY, "tool_choice": "none"}).json()
    without = live.post(CHAT, {"messages": [USER], "max_tokens": 400}).json()
    assert with_tools["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    for answer in (with_tools, without):
        assert answer["choices"][0]["message"]["content"].startswith("Let me see.weather")
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_history_of_calls_reaches_the_template(live: Live) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    tokens = live.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    prompt = live.scripted.tokenizer.decode(tokens, skip_special_tokens=False)
    assert '<|turn|>assistant\n<|calls|><|call|>weather<|sep|>{"city"' in prompt
    assert "<|turn|>tool\nsunny<|end|>" in prompt and '"name": "time-now"' in prompt
    answer = live.post(CHAT, {**SAY, "messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [named("a b")]}, "tools[0].function.name"),
    ({"tools": [named("\U0001f642")]}, "tools[0].function.name"),
    ({"tools": [named("a" * 65)]}, "tools[0].function.name"),
    ({"tools": [named("")]}, "tools[0].function.name"),
    ({"tools": [named("f"), named("f")]}, "tools[1].function.name"),
    ({"tools": [named(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [{**named("f"), "more": 1}]}, "tools[0].more"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**20}}]},
        "tools",
    ),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": named("nobody")}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "1"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, live: Live) -> None:
    response = live.post(CHAT, {**SAY, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error", error


def test_a_model_without_tools_is_told_of_them_in_words() -> None:
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    )
    scripted = make_scripted(max_model_len=2048, num_blocks=512, blocks_per_request=128)
    scripted.runner.scripts = {"call these functions": f"Let me see.\n{call}"}
    with live_server(over=scripted) as live:
        body = {**SAY, "messages": [USER]}
        [choice] = live.post(CHAT, body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        [made] = choice["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"city": "Oslo", "days": 2}
        content, calls, reason = assembled(live.events(CHAT, body))
        assert (content, reason) == ("Let me see.", "tool_calls") and len(calls) == 1
        assert "tool_calls" not in live.chat(tools=TOOLS, tool_choice="none").json()
