"""The SDKs of OpenAI and Anthropic against a live server: what they read is what was said."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import make_scripted
from tool_templates import ARGUMENTS, STYLES, TOOLS

from llmc.server.settings import ServerSettings

openai = pytest.importorskip("openai", reason="openai is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

STYLE = STYLES["name then json"]
FUNCTIONS = [tool["function"] for tool in TOOLS]
ASK: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "call"}],
    "tools": [
        {"name": one["name"], "input_schema": one.get("parameters", {"type": "object"})}
        for one in FUNCTIONS
    ],
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    marks = ("<think>", "</think>")
    scripted = make_scripted(
        chat_template="{# <think></think> #}" + STYLE.template,
        special_tokens=(*STYLE.special_tokens, *marks),
        max_model_len=2048,
        num_blocks=512,
        blocks_per_request=128,
    )
    scripted.runner.scripts = {"warm": "Good.", "call": "<think>Hm.</think>" + STYLE.answer}
    with live_server(ServerSettings(api_keys=["a-key"]), over=scripted) as live:
        yield live


def test_openai_responses(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="a-key", max_retries=0) as client:
        tools: Any = [{"type": "function", **one} for one in FUNCTIONS]
        ask: dict[str, Any] = {"model": "scripted", "input": "call", "tools": tools}
        whole = client.responses.create(**ask)
        with client.responses.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        for response in (whole, streamed):
            assert response.output_text == "Let me see."
            reasoning, _, call, _ = response.output
            assert reasoning.content[0].text == "Hm."
            assert json.loads(call.arguments) == ARGUMENTS
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        more = client.responses.create(
            model="scripted", input=[output], previous_response_id=whole.id
        )
        assert more.previous_response_id == whole.id and more.usage is not None
        assert client.responses.retrieve(whole.id).output_text == "Let me see."
        items = list(client.responses.input_items.list(more.id, limit=2, order="asc"))
        kinds = [item.type for item in items]
        assert kinds[0] == "message" and kinds[-1] == "function_call_output" and len(kinds) > 4
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        with pytest.raises(openai.BadRequestError, match="background is not supported"):
            client.responses.create(model="scripted", input="call", background=True)


def test_anthropic_messages(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}"
    with anthropic.Anthropic(base_url=url, api_key="a-key", max_retries=0) as client:
        ask = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        assert text == "Let me see."
        for message in (whole, streamed):
            thinking, said, use, _ = message.content
            assert (thinking.thinking, said.text) == ("Hm.", "Let me see.")
            assert (use.name, use.input) == ("weather", ARGUMENTS)
            assert message.stop_reason == "tool_use" and message.usage.output_tokens > 0
        counted = client.messages.count_tokens(
            model="scripted", messages=ASK["messages"], tools=ASK["tools"]
        )
        usage = whole.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert whole._request_id
        with pytest.raises(anthropic.NotFoundError, match="not served here") as caught:
            client.messages.create(**{**ASK, "model": "other"})
        assert caught.value.request_id == caught.value.body["request_id"]
        long = [{"role": "user", "content": "word " * 3000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's"):
            client.messages.create(**{**ASK, "messages": long})
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**ASK)


def test_anthropic_models(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}"
    with anthropic.Anthropic(base_url=url, api_key="a-key", max_retries=0) as client:
        page = client.models.list(limit=5)
        assert [one.id for one in page] == ["scripted"]
        assert (page.first_id, page.last_id, page.has_more) == ("scripted", "scripted", False)
        [one] = page.data
        assert (one.type, one.display_name, one.max_input_tokens) == ("model", "scripted", 2048)
        assert abs(one.created_at.timestamp() - time.time()) < 3600
        assert client.models.retrieve("scripted") == one
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("other")
        assert caught.value.body["error"]["type"] == "not_found_error"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="a-key") as others:
        assert others.models.retrieve("scripted").object == "model"


def test_anthropics_tool_runner(live: Live) -> None:
    """It asks for server-side threads, and goes on without them."""

    def weather(city: str, days: int) -> str:
        """Tell the weather.

        Args:
            city: Where.
            days: How many.
        """
        return "warm"

    def now() -> str:
        """Tell the time."""
        return "noon"

    tools = [anthropic.beta_tool(weather), anthropic.beta_tool(now, name="time-now")]
    url = f"http://127.0.0.1:{live.port}"
    with anthropic.Anthropic(base_url=url, api_key="a-key", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**{**ASK, "tools": tools})
        assert [message.content[-1].type for message in runner] == ["tool_use", "text"]
        assert runner.until_done().content[-1].text == "Good."
