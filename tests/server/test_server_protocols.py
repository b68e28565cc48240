"""Anthropic's Messages, OpenAI's Responses and Ollama's API: adapters over the one chat call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from reasoning_templates import STYLES as REASONING
from scripted_engine import make_scripted
from tool_templates import ARGUMENTS, STYLES, TOOLS

from llmc.server.errors import ApiError
from llmc.server.responses_store import ResponseStore
from llmc.server.settings import ServerSettings

MESSAGES, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/chat"
STYLE = STYLES["name then json"]
# A template that knows reasoning and tools, whose prompt begins the reasoning.
TEMPLATE = STYLE.template.replace(
    "{% if add_generation_prompt %}<|turn|>assistant\n",
    "{# <think></think> #}{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if not off %}<think>{% endif %}",
)
SAID = "Hm, 2.\n</think>\n\n" + STYLE.answer
USER = {"role": "user", "content": "call"}
FUNCTIONS = [tool["function"] for tool in TOOLS]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted(
        chat_template=TEMPLATE,
        special_tokens=(*STYLE.special_tokens, *REASONING["the prompt opens"].special_tokens),
        max_model_len=2048,
        num_blocks=512,
        blocks_per_request=128,
    )
    scripted.runner.scripts = {"call": SAID, "plain": "Hm.</think>One two three"}
    with live_server(ServerSettings(api_keys=["a-key", "other"]), over=scripted) as live:
        yield live


def named_events(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events whose name is their type, without a [DONE]."""
    response = live.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt_of(live: Live, messages: list[dict[str, Any]], **options: Any) -> int:
    """The number of tokens that a chat's prompt has."""
    body = {"messages": messages, "max_tokens": 1, **options}
    answer = live.post("/v1/chat/completions", body).json()
    return int(answer["usage"]["prompt_tokens"])


# ---- Anthropic ----

ANTHROPIC_TOOLS = [
    {
        "name": one["name"],
        "description": one.get("description"),
        "input_schema": one.get("parameters", {"type": "object", "properties": {}}),
    }
    for one in FUNCTIONS
]
ASK: dict[str, Any] = {
    "max_tokens": 400,
    "messages": [USER],
    "tools": ANTHROPIC_TOOLS,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "id"} for one in blocks]


BLOCKS = [
    {"type": "thinking", "thinking": "Hm, 2.", "signature": ""},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "weather", "input": ARGUMENTS},
    {"type": "tool_use", "name": "time-now", "input": {}},
]


def test_a_message(live: Live) -> None:
    answer = live.post(MESSAGES, ASK).json()
    assert without_ids(answer["content"]) == BLOCKS
    assert (answer["type"], answer["role"], answer["stop_reason"]) == (
        *("message", "assistant"),
        "tool_use",
    )
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt_of(
        live, [USER], tools=TOOLS
    )


def test_the_events_of_a_message(live: Live) -> None:
    events = named_events(live, MESSAGES, ASK)
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = {key: text for key, text in event["delta"].items() if key != "type"}
                [(name, text)] = delta.items()
                blocks[-1][{"partial_json": "json"}.get(name, name)] += text
            case kind:
                assert kind == "content_block_stop" and event["index"] == len(blocks) - 1
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert without_ids(blocks) == BLOCKS
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-1] == {"type": "message_stop"}


def test_thinking_blocks_are_for_those_who_ask(live: Live) -> None:
    ask = {**ASK, "thinking": {"type": "disabled"}}
    assert without_ids(live.post(MESSAGES, ask).json()["content"]) == BLOCKS[1:]
    kinds = {event["type"] for event in named_events(live, MESSAGES, ask)}
    assert kinds.isdisjoint({"error"}) and "content_block_start" in kinds


def test_the_history_of_a_message_is_that_of_a_chat(live: Live) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}
    text = {"type": "text", "text": "call", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    body = {"system": [{"type": "text", "text": "Be brief."}], "messages": messages}
    function = {"name": "weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
    chat = [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    counted = live.post("/v1/messages/count_tokens", {**body, "tools": ANTHROPIC_TOOLS}).json()
    assert counted == {"input_tokens": prompt_of(live, chat, tools=TOOLS)}


def test_documents_of_text_are_text(live: Live) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Snow."}
    document = {"type": "document", "source": plain, "title": "Report", "context": "Of today."}
    blocks = {"type": "content", "content": [{"type": "text", "text": part} for part in "ab"]}
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": ARGUMENTS}
    result = {
        "type": "tool_result",
        "tool_use_id": "call_1",
        "content": [{"type": "document", "source": blocks}],
    }

    def of_documents(given: bool) -> list[dict[str, Any]]:
        texts = ("Report\n\nOf today.\n\nSnow.", "a\nb")
        first: Any = document if given else {"type": "text", "text": texts[0]}
        return [
            {"role": "user", "content": [first, {"type": "text", "text": "And?"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result if given else {**result, "content": texts[1]}]},
        ]

    counts = [
        live.post("/v1/messages/count_tokens", {"messages": messages, "tools": ANTHROPIC_TOOLS})
        for messages in (of_documents(True), of_documents(False))
    ]
    assert counts[0].status_code == 200, counts[0].text
    assert counts[0].json() == counts[1].json()


def search_result(**fields: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} for part in "ab"]
    return {
        "type": "search_result",
        "title": "Report",
        "source": "snow.md",
        "content": texts,
        **fields,
    }


def test_search_results_are_text(live: Live) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": ARGUMENTS}
    off = search_result(citations={"enabled": False}, cache_control={"type": "ephemeral"})

    def counted(block: dict[str, Any]) -> int:
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [block]}
        messages = [
            {"role": "user", "content": [block, {"type": "text", "text": "And?"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        body = {"messages": messages, "tools": ANTHROPIC_TOOLS}
        response = live.post("/v1/messages/count_tokens", body)
        assert response.status_code == 200, response.text
        return int(response.json()["input_tokens"])

    assert counted(off) == counted({"type": "text", "text": "Report\n\nsnow.md\n\na\nb"})


def test_no_tokens_only_cache_the_prompt(live: Live) -> None:
    """max_tokens 0, by which Anthropic's clients warm the cache."""
    text = "plain and long enough for a block of the cache"
    messages = [{"role": "user", "content": text}]
    body = {"max_tokens": 0, "messages": messages}
    answer = live.post(MESSAGES, body).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    usage = answer["usage"]
    assert (usage["output_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert usage["input_tokens"] == prompt_of(live, messages)
    again = live.post(MESSAGES, {**body, "max_tokens": 1}).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    kinds = [event["type"] for event in named_events(live, MESSAGES, body)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 6}, "max_tokens", None),
        ({"stop_sequences": ["two"]}, "stop_sequence", "two"),
    ],
)
def test_why_a_message_ended(
    fields: dict[str, Any], reason: str, sequence: str | None, live: Live
) -> None:
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": "plain"}], **fields}
    answer = live.post(MESSAGES, body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_a_message_ends_when_the_context_is_full() -> None:
    """Clients must send max_tokens, and send more than small models have."""
    over = make_scripted(max_model_len=256)
    over.runner.scripts = {"call": "one " * 300}
    with live_server(over=over) as live:
        body = {"max_tokens": 20000, "messages": [USER]}
        answer = live.post(MESSAGES, body).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 256
        ended = named_events(live, MESSAGES, body)[-2]
        assert ended["delta"]["stop_reason"] == "model_context_window_exceeded"
        long = {"max_tokens": 1, "messages": [{"role": "user", "content": "x" * 300}]}
        assert live.post(MESSAGES, long).status_code == 400


def test_a_last_message_of_the_assistant_is_continued(live: Live) -> None:
    begun = {"role": "assistant", "content": "The answer"}
    body = {"max_tokens": 5, "messages": [USER, begun]}
    usage = live.post(MESSAGES, body).json()["usage"]
    chat = {"continue_final_message": True}
    count = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count == prompt_of(live, [USER, begun], **chat)


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_the_beginning_of_an_answer_is_continued(live: Live, name: str) -> None:
    """As Mistral, DeepSeek and Moonshot mark it."""
    begun = {"role": "assistant", "content": "The answer"}
    marked = {**begun, name: True}
    usage = live.post("/v1/chat/completions", {"max_tokens": 5, "messages": [USER, marked]}).json()[
        "usage"
    ]
    assert usage["prompt_tokens"] == prompt_of(live, [USER, begun], continue_final_message=True)
    assert usage["prompt_tokens"] == prompt_of(live, [USER, marked])
    assert usage["prompt_tokens"] < prompt_of(live, [USER, {**marked, name: False}])
    for wrong, where in (
        ([{**USER, name: True}], "messages[0]"),
        ([{**begun, name: True}, USER], "messages[0]"),
        ([USER, {**begun, name: "yes"}], "messages[1]"),
    ):
        answer = live.post("/v1/chat/completions", {"max_tokens": 5, "messages": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"{where}.{name}"


def asks_with(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    document = {"type": "document", "source": source, **fields}
    return {"messages": [{"role": "user", "content": [document]}]}


def found(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [search_result(**fields)]}]}


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 0.5}, "max_tokens"),
    (found(title=None), "messages[0].content[0].title"),
    (found(source={"url": "x"}), "messages[0].content[0].source"),
    (found(content="x"), "messages[0].content[0].content must be a list"),
    (found(content=[IMAGE]), "messages[0].content[0].content[0]"),
    (found(citations={"enabled": True}), "citations"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (asks_with({"type": "base64", "media_type": "application/pdf", "data": "JVBE"}), "plain text"),
    (asks_with({"type": "text", "data": 1}), "messages[0].content[0].source.data"),
    (asks_with({"type": "text", "data": "x"}, citations={"enabled": True}), "citations"),
    (asks_with({"type": "text", "data": "x"}, title=1), "messages[0].content[0].title"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].input",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice of type tool"),
    ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice of type any needs tools"),
    ({"tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"container": "c"}, "container"),
    ({"max_token": 1}, "max_token"),
    # goes with tools, as far as grammars can be had: this server's tokenizer has none
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "structured outputs"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG_MESSAGES, ids=lambda value: str(value)[:60])
def test_wrong_messages_are_refused_in_their_shape(
    fields: dict[str, Any], named: str, live: Live
) -> None:
    response = live.post(MESSAGES, {**ASK, **fields})
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, OLLAMA])
def test_keys_guard_every_protocol(path: str, live: Live) -> None:
    for headers in ({"authorization": ""}, {"authorization": "", "x-api-key": "a-keyy"}):
        response = live.post(path, ASK, headers=headers)
        assert response.status_code == 401
        error = response.json()["error"]
        assert "x-api-key" in (error if isinstance(error, str) else error["message"])
    body = {"messages": [USER], "max_tokens": 1} if path == MESSAGES else {}
    body = {RESPONSES: {"input": "call"}, OLLAMA: {"messages": [USER]}}.get(path, body)
    headers = {"authorization": "", "x-api-key": "other"}
    assert live.post(path, body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [(MESSAGES, 405), (f"{MESSAGES}/nothing", 404), ("/api/nothing", 404)]
)
def test_unknown_paths_answer_in_the_shape_of_their_protocol(
    path: str, status: int, live: Live
) -> None:
    response = live.client.get(path)
    assert response.status_code == status
    error = response.json()["error"]
    assert path in (error if path.startswith("/api") else error["message"])


KEY, JSON = "x-api-key: a-key", "content-type: application/json"
NAMED = [  # a request line, further headers, and the answer to it
    ("GET /v1/nothing", [KEY], 404, "not_found_error"),
    ("GET /v1/complete", [KEY], 404, "not_found_error"),
    ("DELETE /v1/models", [KEY], 405, "invalid_request_error"),
    ("GET /v1/models", [], 401, "authentication_error"),
    ("GET /load", [KEY], 404, "not_found_error"),
    (f"POST {RESPONSES}", [KEY, JSON, "content-length: 99999999999"], 413, "request_too_large"),
    (f"POST {RESPONSES}", [KEY, "content-length: 2"], 415, "invalid_request_error"),
    (f"GET {RESPONSES}", [KEY, *(f"x-{i}: x" for i in range(200))], 431, "invalid_request_error"),
]


@pytest.mark.parametrize(("line", "headers", "status", "kind"), NAMED, ids=lambda v: str(v)[:30])
def test_who_names_anthropics_version_gets_its_errors_everywhere(
    line: str, headers: list[str], status: int, kind: str, live: Live
) -> None:
    sent = [f"{line} HTTP/1.1", "host: localhost", "anthropic-version: 2023-06-01", *headers]
    head, _, body = live.raw("\r\n".join([*sent, "", "{}"]).encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    answer = json.loads(body)
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert f"request-id: {answer['request_id']}".encode() in head.lower()


def test_a_top_p_of_0_leaves_the_likeliest_token(live: Live) -> None:
    asked = {"top_p": 0, "temperature": 1}
    answer = live.post(RESPONSES, {"input": "call", **asked}).json()
    assert (answer["temperature"], answer["top_p"]) == (0, 1), "greedy"
    for path, body in (
        (MESSAGES, {"messages": [USER], "max_tokens": 1, **asked}),
        (OLLAMA, {"messages": [USER], "options": {"num_predict": 1, **asked}}),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **asked}),
        ("/v1/completions", {"prompt": "call", "max_tokens": 1, **asked}),
    ):
        assert live.post(path, body).status_code == 200, path


# ---- Responses ----

RESPONSES_TOOLS = [{"type": "function", **one} for one in FUNCTIONS]
CREATE: dict[str, Any] = {"input": "call", "tools": RESPONSES_TOOLS}


def checked_items(items: list[dict[str, Any]]) -> None:
    kinds = [item["type"] for item in items]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm, 2."}]
    [part] = items[1]["content"]
    assert (part["type"], part["text"]) == ("output_text", "Let me see.")
    assert [call["name"] for call in items[2:]] == ["weather", "time-now"]
    assert json.loads(items[2]["arguments"]) == ARGUMENTS and items[3]["arguments"] == "{}"
    assert all(item["status"] == "completed" for item in items)
    assert len({item["id"] for item in items}) == 4


def test_a_response(live: Live) -> None:
    response = live.post(RESPONSES, {**CREATE, "client_metadata": {"turn": "1"}}).json()
    checked_items(response["output"])
    assert (response["status"], response["store"]) == ("completed", True)
    usage = response["usage"]
    assert usage["input_tokens"] == prompt_of(live, [USER], tools=TOOLS)
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    path = f"{RESPONSES}/{response['id']}"
    assert live.client.get(path).json() == response
    streamed = live.client.get(path, params={"stream": "true"})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


def test_the_events_of_a_response(live: Live) -> None:
    events = named_events(live, RESPONSES, CREATE)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    items = events[-1]["response"]["output"]
    checked_items(items)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == items
    for index, name in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        mine = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", items[index]["id"]) for event in mine} == {items[index]["id"]}
        said = "".join(e["delta"] for e in mine if e["type"] == f"response.{name}.delta")
        [end] = [e for e in mine if e["type"] == f"response.{name}.done"]
        assert said == end.get("text", end.get("arguments"))


@pytest.mark.parametrize(
    ("asked", "count"),
    [({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2.0}, 2)],
)
def test_logprobs_of_a_response(asked: dict[str, Any], count: int, live: Live) -> None:
    """Those of the chat call; streamed and whole alike."""
    body = {"input": "plain", **asked}
    response = live.post(RESPONSES, body).json()
    assert response["top_logprobs"] == count
    [part] = response["output"][-1]["content"]
    chat = {"messages": [{"role": "user", "content": "plain"}], "logprobs": True}
    answer = live.post("/v1/chat/completions", {**chat, "top_logprobs": count}).json()
    assert part["logprobs"] == answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [count] * len(
        part["logprobs"]
    )

    events = named_events(live, RESPONSES, body)
    assert events[-1]["response"]["output"][-1]["content"][0]["logprobs"] == part["logprobs"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    said = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    carried = [entry for entries in said for entry in entries]
    assert carried == part["logprobs"][: len(carried)] and all(said)
    assert len(carried) >= len(part["logprobs"]) - 1  # the end token has no text


def test_a_response_goes_on_from_another(live: Live) -> None:
    first = live.post(RESPONSES, {**CREATE, "instructions": "Be brief."}).json()
    call = first["output"][2]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body = {"tools": RESPONSES_TOOLS, "store": False}
    by_id = {**body, "input": [output], "previous_response_id": first["id"]}
    whole = {**body, "input": [{"role": "user", "content": "call"}, *first["output"], output]}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    by_item = {**body, "input": [{"role": "user", "content": "call"}, *references, output]}
    answers = [live.post(RESPONSES, one).json() for one in (by_id, whole, by_item)]
    assert len({answer["usage"]["input_tokens"] for answer in answers}) == 1
    assert live.client.get(f"{RESPONSES}/{answers[0]['id']}").status_code == 404


def test_the_items_that_a_response_was_made_from(live: Live) -> None:
    first = live.post(RESPONSES, CREATE).json()
    call = first["output"][2]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    said = {"role": "user", "content": [{"type": "input_text", "text": "plain"}]}
    body = {"input": [output, said], "previous_response_id": first["id"]}
    second = live.post(RESPONSES, body).json()

    def items(response: dict[str, Any], **query: Any) -> Any:
        path = f"{RESPONSES}/{response['id']}/input_items"
        return live.client.get(path, params=query).json()

    [asked] = items(first)["data"]
    assert asked["id"].startswith("msg_") and asked["content"][0]["text"] == "call"
    page = items(second, order="asc")
    assert page["data"][:-2] == [asked, *first["output"]] and not page["has_more"]
    assert [one["type"] for one in page["data"][-2:]] == ["function_call_output", "message"]
    assert page["data"][-1]["content"] == said["content"]
    newest = items(second, limit=2)
    assert newest["data"] == page["data"][:-3:-1] and newest["has_more"]
    rest = items(second, after=newest["last_id"])
    assert [*newest["data"], *rest["data"]] == page["data"][::-1]
    assert items(second, limit=101)["error"]["param"] == "limit"
    assert live.client.get(f"{RESPONSES}/resp_0/input_items").status_code == 404


def test_the_input_tokens_of_a_response_are_counted(live: Live) -> None:
    count = f"{RESPONSES}/input_tokens"
    assert live.client.put(count).headers["allow"] == "POST"
    first = live.post(RESPONSES, CREATE).json()
    for body in (
        CREATE,
        {**CREATE, "instructions": "Be brief.", "previous_response_id": first["id"]},
    ):
        tokens = live.post(RESPONSES, body).json()["usage"]["input_tokens"]
        assert live.post(count, body).json() == {
            "object": "response.input_tokens",
            "input_tokens": tokens,
        }


def test_a_stored_response_is_its_callers(live: Live) -> None:
    made = live.post(RESPONSES, {"input": "plain"}).json()
    path = f"{RESPONSES}/{made['id']}"
    other = {"authorization": "Bearer other"}
    assert live.client.get(path, headers=other).status_code == 404
    assert live.client.delete(path, headers=other).status_code == 404
    body = {"input": "more", "previous_response_id": made["id"]}
    error = live.post(RESPONSES, body, headers=other).json()["error"]
    assert error["param"] == "previous_response_id"
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    error = live.post(RESPONSES, {"input": [reference]}, headers=other).json()["error"]
    assert error["param"] == "input[0]" and "send the item itself" in error["message"]
    assert live.client.delete(path).json()["deleted"] is True
    assert live.client.delete(path).status_code == 404


def test_a_response_that_is_cut(live: Live) -> None:
    body = {"input": "plain", "max_output_tokens": 8}
    response = live.post(RESPONSES, body).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert named_events(live, RESPONSES, body)[-1]["type"] == "response.incomplete"


def test_where_a_response_stops(live: Live) -> None:
    stopped = live.post(RESPONSES, {"input": "plain", "stop": [" three"]}).json()
    assert stopped["output"][-1]["content"][0]["text"] == "One two"
    body = {"input": "plain", "ignore_eos": True, "min_tokens": 9, "max_output_tokens": 40}
    assert live.post(RESPONSES, body).json()["usage"]["output_tokens"] == 40
    error = live.post(RESPONSES, {**body, "min_tokens": 41}).json()["error"]
    assert error["param"] == "min_tokens"


CUT = 42  # tokens, up to the middle of the first call's arguments


def test_a_call_that_is_cut(live: Live) -> None:
    """The call's beginning, where the protocol has a place for it; whole and streamed alike."""
    tools = [{"type": "function", **one} for one in FUNCTIONS]
    body = {"input": [USER], "tools": tools, "max_output_tokens": CUT}
    response = live.post(RESPONSES, body).json()
    events = named_events(live, RESPONSES, body)
    for items in (response["output"], events[-1]["response"]["output"]):
        assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]
        assert items[-1]["name"] == "weather" and items[-1]["arguments"].startswith('{"city": "')
        assert not items[-1]["arguments"].endswith("}")
    assert events[-2]["item"]["status"] == "incomplete"
    # The conversation goes on without that call, which templates can't render.
    more = {"input": "plain", "previous_response_id": response["id"]}
    assert live.post(RESPONSES, more).json()["status"] == "completed"

    ask = {**ASK, "max_tokens": CUT}
    message = live.post(MESSAGES, ask).json()
    assert message["stop_reason"] == "max_tokens"
    assert without_ids(message["content"])[-1] == {**BLOCKS[2], "input": {}}
    pieces = [event.get("delta", {}) for event in named_events(live, MESSAGES, ask)]
    text = "".join(piece.get("partial_json", "") for piece in pieces)
    assert text == response["output"][-1]["arguments"]

    said = {"messages": [USER], "tools": TOOLS, "options": {"num_predict": CUT}}
    whole = live.post(OLLAMA, {**said, "stream": False}).json()
    assert "tool_calls" not in whole["message"] and whole["done_reason"] == "length"
    told = [one["message"] for one in lines(live, OLLAMA, said)]
    assert not any("tool_calls" in one for one in told)
    assert "".join(one["content"] for one in told) == whole["message"]["content"]


def test_the_store_has_limits() -> None:
    store = ResponseStore(max_stored=2, max_bytes=400)
    for name in "abc":
        store.put({"id": name}, [], "me")
    with pytest.raises(ApiError, match="no response 'a'"):
        store.get("a", "me")
    store.put({"id": "large"}, [{"content": "x" * 362}], "me")
    for name in "bc":
        with pytest.raises(ApiError):
            store.get(name, "me")
    store.put({"id": "too large"}, [{"content": "x" * 400}], "me")
    assert store.get("large", "me").messages[0]["content"] == "x" * 362


def test_nothing_of_an_input_is_cut(live: Live) -> None:
    body = {"input": "count", "truncation": "auto"}
    made = live.post("/v1/responses", body)
    assert made.status_code == 200 and made.json()["truncation"] == "disabled"
    refused = live.post("/v1/responses", {**body, "input": "count " * 2000})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


WRONG_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "middle"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ({"input": []}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_RESPONSES, ids=lambda value: str(value)[:60])
def test_wrong_fields_of_a_response_are_named(
    fields: dict[str, Any], param: str, live: Live
) -> None:
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        response = live.post(path, {"input": "call", **fields})
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["param"] == param, response.text


def test_more_processes_keep_no_responses() -> None:
    with live_server(ServerSettings(api_workers=2)) as live:
        made = live.post(RESPONSES, {"input": "count"}).json()
        assert made["status"] == "completed" and made["store"] is False
        for answer in (
            live.client.get(f"{RESPONSES}/{made['id']}"),
            live.post(RESPONSES, {"input": "count", "previous_response_id": made["id"]}),
            live.post(RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ):
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "unsupported_parameter"


# ---- Ollama ----


def lines(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_an_ollama_chat(live: Live) -> None:
    body = {"model": "scripted:latest", "messages": [USER], "tools": TOOLS}
    whole = live.post(OLLAMA, {**body, "stream": False}).json()
    message = whole["message"]
    assert (message["thinking"], message["content"]) == ("Hm, 2.", "Let me see.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"name": "weather", "arguments": ARGUMENTS},
        {"name": "time-now", "arguments": {}},
    ]
    *told, last = lines(live, OLLAMA, body)
    for field in ("thinking", "content"):
        assert "".join(one["message"].get(field, "") for one in told) == message[field]
    streamed = [call for one in told for call in one["message"].get("tool_calls", ())]
    assert streamed == message["tool_calls"]
    assert not any(one["done"] for one in told) and last["message"]["content"] == ""
    for end in (whole, last):
        assert (end["done"], end["done_reason"]) == (True, "stop")
        assert end["prompt_eval_count"] == prompt_of(live, [USER], tools=TOOLS)
        assert end["total_duration"] >= end["eval_duration"] >= 0
    history = [USER, message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    assert lines(live, OLLAMA, {**body, "messages": history})[-1]["done"] is True


def test_ollama_logprobs(live: Live) -> None:
    body = {"messages": [USER], "tools": TOOLS, "logprobs": True, "top_logprobs": 2}
    whole = live.post(OLLAMA, {**body, "stream": False}).json()
    told = lines(live, OLLAMA, body)
    assert [one for line in told for one in line.get("logprobs", [])] == whole["logprobs"]
    assert len(whole["logprobs"]) == whole["eval_count"]
    said = {"messages": [USER], "tools": TOOLS, "logprobs": True, "top_logprobs": 2}
    [choice] = live.post("/v1/chat/completions", said).json()["choices"]
    assert choice["logprobs"]["content"] == whole["logprobs"]
    prompt = {"prompt": "plain", "raw": True, "logprobs": True, "stream": False}
    made = live.post("/api/generate", prompt).json()
    assert [one["top_logprobs"] for one in made["logprobs"]] == [[]] * made["eval_count"]
    refused = live.post(OLLAMA, {"messages": [USER], "top_logprobs": 2})
    assert refused.status_code == 400 and "needs logprobs" in refused.json()["error"]


def test_ollama_thinking_can_be_left_out(live: Live) -> None:
    body = {"messages": [USER], "think": False, "stream": False}
    assert "thinking" not in live.post(OLLAMA, body).json()["message"]
    assert not any(
        "thinking" in one["message"] for one in lines(live, OLLAMA, body | {"stream": True})
    )


def test_ollama_generates(live: Live) -> None:
    body = {"prompt": "plain", "stream": False, "options": {"num_predict": 6, "num_ctx": 64}}
    chat = live.post("/api/generate", body).json()
    assert (chat["thinking"], chat["done_reason"]) == ("Hm.", "length")
    raw = live.post("/api/generate", {**body, "raw": True}).json()
    assert raw["prompt_eval_count"] < chat["prompt_eval_count"] and "thinking" not in raw
    assert raw["response"].startswith("Hm.")
    told = lines(live, "/api/generate", {"prompt": "plain"})
    assert "".join(one["response"] for one in told) == "One two three"
    assert live.post("/api/generate", {}).json()["done_reason"] == "load"


def test_what_ollama_clients_ask_of_the_model(live: Live) -> None:
    [model] = live.client.get("/api/tags").json()["models"]
    assert model["name"] == "scripted"
    shown = live.post("/api/show", {"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["llmc.context_length"] == 2048
    [major, minor, patch] = live.client.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor), int(patch)) >= (0, 6, 4), "which VS Code needs"
    assert re.fullmatch("[0-9a-f]{64}", model["digest"]), "ollama list prints its first 12 digits"
    [running] = live.client.get("/api/ps").json()["models"]
    assert {**running, **model} == running and running["context_length"] == 2048


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_ollama_bodies_need_no_type_unless_a_page_sends_them(kind: str | None, live: Live) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"messages": [USER], "stream": False}).encode()
    assert live.client.post(OLLAMA, content=body, headers=headers).json()["done"]
    page = {**headers, "origin": str(live.client.base_url)}
    assert live.client.post(OLLAMA, content=body, headers=page).status_code == 415


WRONG_OLLAMA: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "other"),
    ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
    ({"options": "x"}, 400, "options"),
    ({"options": {"top_kk": 1}}, 400, "options.top_kk"),
    ({"options": {"temperature": 3}}, 400, "options.temperature"),
    ({"options": {"num_predict": 0}}, 400, "options.num_predict must be at least 1"),
    ({"format": "xml"}, 400, "format"),
    ({"messages": [{**USER, "images": ["aGk="]}]}, 400, "it reads text only"),
    ({"messages": [{**USER, "images": "aGk="}]}, 400, "messages[0].images"),
    ({"template": "{{ .Prompt }}"}, 400, "template"),
]


@pytest.mark.parametrize(
    ("fields", "status", "named"), WRONG_OLLAMA, ids=lambda value: str(value)[:60]
)
def test_what_ollama_clients_may_not_ask(
    fields: dict[str, Any], status: int, named: str, live: Live
) -> None:
    response = live.post(OLLAMA, {"messages": [USER], **fields})
    assert response.status_code == status, response.text
    assert named in response.json()["error"]


def test_an_error_in_a_stream_has_the_shape_of_its_protocol(live: Live) -> None:
    """Each begins with a token, and then the model's logits are broken."""
    calls: dict[str, dict[str, Any]] = {
        MESSAGES: {"messages": [{"role": "user", "content": "plain"}], "max_tokens": 9},
        RESPONSES: {"input": "plain"},
        OLLAMA: {"messages": [{"role": "user", "content": "plain"}]},
    }
    reply = live.scripted.runner.next_token

    def breaks(new: Any, tokens: Any) -> int | None:
        return None if len(tokens) > new.num_prompt_tokens + 3 else reply(new, tokens)

    live.scripted.runner.next_token, live.scripted.runner.delay_s = breaks, 0.02
    try:
        for path, body in calls.items():
            last = live.post(path, {**body, "stream": True}).text.strip().splitlines()[-1]
            event = json.loads(last.removeprefix("data: "))
            if path == OLLAMA:
                assert isinstance(event["error"], str) and event.keys() == {"error"}
            elif path == MESSAGES:
                assert event["type"] == "error" and event["error"]["type"] == "api_error"
            else:
                assert (event["type"], event["code"]) == ("error", "engine_error")
                assert event["sequence_number"] > 1
    finally:
        live.scripted.runner.next_token, live.scripted.runner.delay_s = reply, 0.0
