"""A chat on a scripted engine and on a fake server: streaming, stopping, a full context."""

from __future__ import annotations

import asyncio
import json
import os
import termios
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from scripted_engine import REPLY, SCRIPTS, make_scripted

from llmc.async_llm import AsyncLLM
from llmc.cli.chat import find_question, is_model_word
from llmc.cli.chat_backends import ServerBackend
from llmc.cli.chat_engine import EngineBackend
from llmc.cli.chat_session import Ask, chat_with_engine
from llmc.cli.chat_terminal import stream_answer, visible
from llmc.cli.conversation import Conversation, TurnStats, why_it_ended
from llmc.config import EngineConfig
from llmc.errors import ConfigError, InvalidRequestError, LlmcError
from llmc.load_test.client import Target, open_client


def make_backend(**options: Any) -> tuple[EngineBackend, AsyncLLM, Any]:
    scripted = make_scripted(**options)
    llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
    return EngineBackend(llm), llm, scripted


def ask(backend: EngineBackend, chat: Conversation) -> tuple[list[str], TurnStats]:
    """The pieces that were written, and the stats of the answer."""
    pieces: list[str] = []

    async def run() -> TurnStats:
        try:
            _, stats = await stream_answer(backend, chat, pieces.append)
        finally:
            await backend.close()
        return stats

    return pieces, asyncio.run(run())


def test_an_answer_streams_and_joins_the_conversation() -> None:
    backend, _, scripted = make_backend()
    scripted.runner.delay_s = 0.005  # else the engine may be done before the first piece is read
    chat = Conversation(model=backend.model, system="Be kind.", settings={"temperature": 0.0})
    chat.ask("say something")
    pieces, stats = ask(backend, chat)
    assert "".join(pieces) == REPLY and len(pieces) > 3
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    assert chat.turns[1]["content"] == REPLY
    assert stats.completion_tokens == len(scripted.tokenizer.encode(REPLY)) + 1
    assert stats.finish_reason == "stop" and stats.prompt_tokens
    assert chat.context_tokens == stats.prompt_tokens + stats.completion_tokens
    assert 0 <= stats.ttft_s <= stats.total_s


def test_settings_reach_the_engine() -> None:
    backend, _, _ = make_backend()
    chat = Conversation(model="m", settings={"max_tokens": 3})
    chat.ask("count")
    _, stats = ask(backend, chat)
    assert (stats.completion_tokens, stats.finish_reason) == (3, "length")
    why = why_it_ended(stats, chat)
    assert why is not None and "stopped at 3 tokens" in why


def test_stopping_keeps_what_was_said_and_frees_the_engine() -> None:
    backend, llm, scripted = make_backend()
    scripted.runner.delay_s = 0.01
    chat = Conversation(model="m")
    chat.ask("count")
    pieces: list[str] = []

    async def run() -> None:
        task = asyncio.create_task(stream_answer(backend, chat, pieces.append))
        while not pieces and not task.done():
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.num_active == 0
        await backend.close()

    asyncio.run(run())
    said = chat.turns[1]["content"]
    assert said == "".join(pieces) and SCRIPTS["count"].startswith(said)
    assert chat.history[-1].finish_reason == "abort"


def test_a_full_context_refuses_the_question_and_keeps_the_chat() -> None:
    backend, _, _ = make_backend(max_model_len=64)
    chat = Conversation(model="m", context_limit=backend.context_limit)
    chat.ask("x" * 200)
    with pytest.raises(InvalidRequestError) as caught:
        ask(backend, chat)
    assert caught.value.code == "context_length_exceeded"
    assert chat.turns == []


def test_an_answer_that_fills_the_context_says_so() -> None:
    backend, _, _ = make_backend(max_model_len=64)
    chat = Conversation(model="m", context_limit=backend.context_limit)
    chat.ask("say something")
    _, stats = ask(backend, chat)
    why = why_it_ended(stats, chat)
    assert why is not None and "context of 64 tokens is full" in why and "/reset" in why


def test_a_model_without_template_continues_the_text() -> None:
    backend, _, _ = make_backend(chat_template=None)
    assert not backend.has_template
    chat = Conversation(model="m")
    chat.ask("count")
    pieces, _ = ask(backend, chat)
    assert "".join(pieces) == SCRIPTS["count"]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert visible("a\x1b[31mb\x07c\x9bd\te\nf\u00e9\x7f") == "a[31mbcd\te\nf\u00e9"
    backend, _, _ = make_backend()
    chat = Conversation(model="m")
    chat.ask("control")
    pieces, _ = ask(backend, chat)
    assert "".join(pieces) == "beforeafter."


def serve_events(*events: Any, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            models = [{"id": "far", "max_model_len": 99}, {"id": "other"}]
            return httpx.Response(200, json={"data": models})
        assert json.loads(request.content)["messages"] == [{"role": "user", "content": "hi"}]
        if status != 200:
            return httpx.Response(status, json=events[0])
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text=": keep-alive\n\n" + "".join(lines) + "data: [DONE]\n\n")

    return handle


def ask_server(
    handle: Callable[[httpx.Request], httpx.Response], model: str | None = None
) -> tuple[str, TurnStats, ServerBackend]:
    async def run() -> tuple[str, TurnStats, ServerBackend]:
        backend = await ServerBackend.connect(
            "http://far:1/v1", model=model, transport=httpx.MockTransport(handle)
        )
        try:
            chat = Conversation(model=backend.model)
            chat.ask("hi")
            text, stats = await stream_answer(backend, chat, lambda piece: None)
        finally:
            await backend.close()
        return text, stats, backend

    return asyncio.run(run())


def test_a_server_answers_like_an_engine() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2,
             "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip
    text, stats, backend = ask_server(
        serve_events(
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Hel"}}]},
            {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        )
    )
    assert text == "Hello"
    assert (backend.model, backend.context_limit) == ("far", 99)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (5, 4, 2)
    assert stats.finish_reason == "stop"


def test_server_errors_are_told_apart() -> None:
    full = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    with pytest.raises(InvalidRequestError, match="too long") as caught:
        ask_server(serve_events(full, status=400))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(LlmcError, match="try later"):
        ask_server(serve_events({"error": {"message": "try later"}}, status=503))
    for error in ({"message": "gone"}, "gone"):  # some servers send only the text
        with pytest.raises(LlmcError, match="stopped the answer: gone"):
            ask_server(serve_events({"error": error}))
    for event in (["gone"], "gone", None):
        with pytest.raises(LlmcError, match="an event that is not a JSON object: '.*'"):
            ask_server(serve_events(event))
    with pytest.raises(ConfigError, match="has no model 'x'; it offers far, other"):
        ask_server(serve_events(), model="x")


def test_servers_may_leave_out_or_void_what_is_optional() -> None:
    token = {"token": "Hi", "logprob": -0.5}
    text, stats, _ = ask_server(
        serve_events(
            {"error": None, "choices": [{"delta": {"content": "Hi"}, "logprobs": None}]},
            {"choices": [{"delta": {}, "logprobs": {"content": [token]}}], "usage": None},
        )
    )
    assert (text, stats.completion_tokens) == ("Hi", 0)


class Models(BaseHTTPRequestHandler):
    """Answers any GET with a list of one model."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "near"}]}')

    def log_message(self, *args: object) -> None:
        """Nothing is logged."""


def test_proxies_of_the_environment_are_not_asked_for_a_server_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def ask(url: str) -> tuple[str, int]:
        backend = await ServerBackend.connect(url)
        await backend.close()
        async with open_client(Target(base_url=url)) as client:
            return backend.model, (await client.get("/v1/models")).status_code

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert asyncio.run(ask(f"http://127.0.0.1:{server.server_port}")) == ("near", 200)
        server.shutdown()
    with pytest.raises(ConfigError, match="no server answers at http://far:1"):
        asyncio.run(ServerBackend.connect("http://far:1"))


@pytest.mark.parametrize("url", ["http://[", "http://far:99999999", "http://far:one"])
def test_a_url_that_cannot_be_one_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="--url must be a URL, got '"):
        asyncio.run(ServerBackend.connect(url))
    with pytest.raises(ConfigError, match="--base-url must be a URL, got '"):
        Target(base_url=url)


@pytest.mark.parametrize(
    ("word", "expected"),
    [("./m", True), ("/no/such", True), ("~/m", True), ("owner/name", True), ("what?", False),
     ("hello", False), ("either/or both", False), ("m.gguf", True), ("M.GGUF", True),
     ("a" * 9999, False)],
)  # fmt: skip
def test_what_counts_as_a_model(word: str, expected: bool) -> None:
    assert is_model_word(word) is expected


def test_keys_typed_while_a_model_loads_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = os.openpty()

    def echoes() -> bool:
        return bool(termios.tcgetattr(near)[3] & termios.ECHO)

    def load(*_: Any, **__: Any) -> None:
        assert not echoes()
        raise LlmcError("the model is broken")

    monkeypatch.setattr("llmc.cli.chat_session.load_async_llm", load)
    ask = Ask(question=None, system=None, settings={}, show_stats=None)
    with open(near, encoding="utf-8") as stdin, open(far, "wb"):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(LlmcError, match="broken"):
            chat_with_engine(EngineConfig(), ask)
        assert echoes()


def test_bytes_that_are_no_text_are_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped").write_bytes(b"\xff\xfe hi")
    for errors in ("strict", "surrogateescape"):
        with open(tmp_path / "piped", encoding="utf-8", errors=errors) as piped:
            monkeypatch.setattr("sys.stdin", piped)
            with pytest.raises(ConfigError, match="stdin is not UTF-8 text"):
                find_question([], None)


def test_the_question_comes_from_words_and_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.cli.chat.read_piped_stdin", lambda: "from a file\n")
    assert find_question(["What", "is", "this?"], None) == "What is this?\n\nfrom a file"
    assert find_question([], None) == "from a file"
    monkeypatch.setattr("llmc.cli.chat.read_piped_stdin", lambda: "")
    assert find_question([], "quick") == "quick"
    with pytest.raises(ConfigError, match="no question was given"):
        find_question([], None)
