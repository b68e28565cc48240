"""A model that must call: its answers are calls that fit the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import CHAT_TEMPLATE
from tiny_chat import start_tiny_chat
from tool_templates import STYLES, TOOLS

CHAT = "/v1/chat/completions"
# Short texts, for a model that knows no end of them.
CITY = {"type": "string", "enum": ["Oslo", "S\u00e3o Paulo"]}
WEATHER = {
    **TOOLS[0]["function"]["parameters"],
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time-now"}},
]
SAY = {
    "messages": [{"role": "user", "content": "A pass?"}],
    "tools": FUNCTIONS,
    "max_tokens": 640,
    "seed": 3,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# The model has two special tokens of its own, which mark the calls here.
MARKED = (
    STYLES["name then json"]
    .template.replace("<|call|>", "<|im_start|>")
    .replace("<|endcall|>", "<|im_end|>")
)
TEMPLATES = {
    "json in tags": STYLES["json in tags"].template,
    "key by key": STYLES["key by key"].template,
    "special tokens": MARKED,
    "generic": CHAT_TEMPLATE,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    model = start_tiny_chat(max_model_len=2048, max_num_seqs=4)
    with live_server(over=model) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture(params=TEMPLATES)
def styled(request: pytest.FixtureRequest, live: Live) -> Live:
    live.scripted.tokenizer.chat_template = TEMPLATES[request.param]
    return live


def check(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "weather":
        assert set(arguments) == {"city", "days"} and arguments["city"] in CITY["enum"]
        assert type(arguments["days"]) is int and 0 <= arguments["days"] <= 99
    else:
        assert (name, arguments) == ("time-now", {})
    return str(name)


def test_a_function_that_is_named_is_called(styled: Live) -> None:
    body = {**SAY, "tool_choice": NAMED, "n": 2, "temperature": 1.2}
    for choice in styled.post(CHAT, body).json()["choices"]:
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert check(call) == "weather"


def test_required_calls_in_a_stream(styled: Live) -> None:
    body = {**SAY, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    events = styled.events(CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in pieces)
    assert not any(delta.get("content") for delta in deltas)
    check({"function": {"name": pieces[0]["function"]["name"], "arguments": arguments}})
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_with_auto_the_answer_is_free(styled: Live) -> None:
    [choice] = styled.post(CHAT, {**SAY, "max_tokens": 12, "temperature": 0}).json()["choices"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]


def test_only_allowed_functions_are_called(styled: Live) -> None:
    body = {**SAY, "tool_choice": allowed("required", "time-now"), "n": 2, "temperature": 1.2}
    for choice in styled.post(CHAT, body).json()["choices"]:
        calls = choice["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"time-now"}


def test_a_key_whose_schema_is_false_is_never_written(styled: Live) -> None:
    keys = {"city": {"type": "string", "maxLength": 4}, "never": False, "any": True}
    parameters = {"type": "object", "properties": keys, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    body = {**SAY, "tools": tools, "tool_choice": NAMED, "n": 4, "temperature": 1.5, "seed": 1}
    for choice in styled.post(CHAT, body).json()["choices"]:
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        if choice["finish_reason"] != "length":
            assert {"city"} <= json.loads(arguments).keys() <= {"city", "any"}
    parameters["required"] = ["never"]
    response = styled.post(CHAT, body)
    assert response.status_code == 400 and "never" in response.json()["error"]["message"]


def test_an_answer_is_a_call_or_follows_its_own_schema(styled: Live) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    more = {"response_format": form, "parallel_tool_calls": False, "temperature": 1.2, "n": 4}
    body = {**SAY, **more, "seed": 1}
    for choice in styled.post(CHAT, body).json()["choices"]:
        if choice["finish_reason"] == "tool_calls":
            assert all(check(call) for call in choice["message"]["tool_calls"])
        else:
            assert list(json.loads(choice["message"]["content"])) == ["sure"], choice
    must = styled.post(CHAT, {**body, "tool_choice": NAMED}).json()["choices"]
    assert all(check(one["message"]["tool_calls"][0]) == "weather" for one in must)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [{**NAMED, "function": {"name": "weather", "parameters": {"$ref": "#/no"}}}]},
            "tools",
        ),
        ({"tool_choice": "auto", "structured_outputs": {"regex": "a"}}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("auto", "nobody")}, "tool_choice"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
def test_what_can_not_be_forced_is_refused(
    fields: dict[str, Any], param: str, styled: Live
) -> None:
    response = styled.post(CHAT, {**SAY, "tool_choice": NAMED, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text
