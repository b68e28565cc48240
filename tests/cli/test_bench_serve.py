"""`llmc bench serve` against a tiny HTTP server that streams what the test wrote."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.cli.main import main
from llmc.errors import ConfigError
from llmc.load_test.client import Target, request_body, send
from llmc.load_test.metrics import RequestTrace
from llmc.load_test.serving import Load, fetch_token_ids, find_model, run_load
from llmc.load_test.workloads import BenchRequest

TOKENS = ["a", "", "b", "c"]  # the empty one is part of a character: no text yet


class Stub(ThreadingHTTPServer):
    """Answers both APIs, counts what is under way, and fails on request."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.fail_prompt: Any = None
        self.break_stream = False
        self.has_tokenize = True
        self.gate = threading.Event()  # requests wait for it
        self.gate.set()
        self.lock = threading.Lock()
        self.num_active = self.max_active = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "stub-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            if not self.server.has_tokenize:
                return self._json(404, {"error": {"message": "no such route"}})
            return self._json(200, {"tokens": [ord(c) for c in body["prompt"]]})
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.num_active += 1
            self.server.max_active = max(self.server.max_active, self.server.num_active)
        self.server.gate.wait(10)
        try:
            if body.get("prompt") == self.server.fail_prompt is not None:
                return self._json(400, {"error": {"message": "too\nlong", "code": "bad"}})
            self._stream(body)
        finally:
            with self.server.lock:
                self.server.num_active -= 1
        return None

    def _json(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        self.wfile.write(b": keep-alive\n\n")
        for token in TOKENS:
            choice = {"delta": {"content": token}} if chat else {"text": token}
            self._event({"choices": [choice]})
        if self.server.break_stream:
            self._event({"error": {"message": "the engine died"}})
        self._event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def make_requests(count: int) -> list[BenchRequest]:
    return [BenchRequest(token_ids=(i, i + 1), prompt_len=2, output_len=4) for i in range(count)]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('["gone"]', "the server sent an event that is not a JSON object: '[\"gone\"]'"),
        ("{gone", "the server sent an event that is not a JSON object: '{gone'"),
        ('{"error": "gone"}', 'error event: "gone"'),
        ('{"error": null}', None),
    ],
)
def test_odd_events_end_a_trace_and_not_the_run(event: str, error: str | None) -> None:
    token = json.dumps({"choices": [{"text": "a"}]})
    answer = httpx.Response(200, text=f"data: {token}\n\ndata: {event}\n\n")

    async def run() -> RequestTrace:
        transport = httpx.MockTransport(lambda request: answer)
        async with httpx.AsyncClient(base_url="http://x", transport=transport) as client:
            return await send(client, Target(base_url="http://x"), make_requests(1)[0])

    trace = asyncio.run(run())
    assert (trace.error, trace.text) == (error, "a")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_traces_hold_text_chunks_and_usage(stub: Stub, backend: str) -> None:
    target = Target(base_url=stub.url, backend=backend, model="stub-model")
    requests = [BenchRequest(text="hello", output_len=4)] * 3
    traces, duration_s = asyncio.run(run_load(target, Load(), requests))
    assert [trace.error for trace in traces] == [None] * 3
    for trace in traces:
        assert trace.text == "abc"
        assert len(trace.token_times_s) == 3  # neither the role nor an empty chunk counts
        assert (trace.prompt_tokens, trace.output_tokens) == (9, 4)
        assert 0 < trace.ttft_s <= trace.e2el_s <= duration_s


def test_request_bodies() -> None:
    request = BenchRequest(token_ids=(1, 2), output_len=5)
    plain = Target(base_url="http://x", model="m", ignore_eos=True, extra_body={"top_k": 3})
    assert request_body(plain, request) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 3,
    }
    chat = Target(base_url="http://x", backend="openai-chat", temperature=None)
    body = request_body(chat, BenchRequest(text="hi", output_len=5))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "temperature" not in body and "ignore_eos" not in body


def test_concurrency_is_held_to_its_limit(stub: Stub) -> None:
    target = Target(base_url=stub.url, model="m")
    asyncio.run(run_load(target, Load(max_concurrency=2), make_requests(8)))
    assert stub.max_active <= 2
    assert len(stub.bodies) == 8


def test_without_a_limit_all_are_under_way_at_once(stub: Stub) -> None:
    async def run() -> None:
        target = Target(base_url=stub.url, model="m")
        running = asyncio.create_task(run_load(target, Load(), make_requests(8)))
        while stub.num_active < 8:  # deadlocks into pytest's patience if they do not all come
            await asyncio.sleep(0.005)
            assert not running.done()
        stub.gate.set()
        await running

    stub.gate.clear()
    asyncio.run(asyncio.wait_for(run(), 10))
    assert stub.max_active == 8


def test_a_failed_request_does_not_stop_the_others(stub: Stub) -> None:
    stub.fail_prompt = [1, 2]
    target = Target(base_url=stub.url, model="m")
    traces, _ = asyncio.run(run_load(target, Load(), make_requests(3)))
    assert [trace.error for trace in traces] == [None, "HTTP 400: too long", None]


def test_an_error_inside_the_stream_is_a_failure(stub: Stub) -> None:
    stub.break_stream = True
    target = Target(base_url=stub.url, model="m")
    [trace], _ = asyncio.run(run_load(target, Load(), make_requests(1)))
    assert trace.error is not None and "the engine died" in trace.error


def test_warmups_are_sent_first_and_not_measured(stub: Stub) -> None:
    target = Target(base_url=stub.url, model="m")
    warmups = [BenchRequest(text="warm", output_len=1)]
    traces, _ = asyncio.run(run_load(target, Load(), make_requests(2), warmups=warmups))
    assert len(traces) == 2
    assert [body["prompt"] for body in stub.bodies][0] == "warm" and len(stub.bodies) == 3
    stub.fail_prompt = "warm"
    with pytest.raises(ConfigError, match="warm-up .* failed: HTTP 400"):
        asyncio.run(run_load(target, Load(), [], warmups=warmups))


def test_model_and_tokens_are_asked_of_the_server(stub: Stub) -> None:
    target = Target(base_url=stub.url)
    assert asyncio.run(find_model(target, 0.0)) == "stub-model"
    assert asyncio.run(fetch_token_ids(target, "abc")) == [97, 98, 99]
    stub.has_tokenize = False
    assert asyncio.run(fetch_token_ids(target, "abc")) is None


def test_the_command_prints_the_block_and_writes_the_files(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    code = main(
        ["bench", "serve", "--base-url", stub.url, "--num-prompts", "5", "--random-input-len", "7",
         "--random-output-len", "4", "--request-rate", "200", "--max-concurrency", "3",
         "--goodput", "ttft:60000", "--output-json", str(path), "--save-detailed"]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert f"{'Successful requests:':<40} 5\n" in out
    assert "Request goodput (req/s):" in out and "P99 TPOT (ms):" in out
    result = json.loads(path.read_text())
    assert result["model_id"] == "stub-model" and result["completed"] == 5
    assert (result["request_rate"], result["max_concurrency"]) == (200.0, 3)
    assert result["total_output_tokens"] == 20 and result["total_input_tokens"] == 45
    assert result["generated_texts"] == ["abc"] * 5 and len(result["itls"][0]) == 2
    assert result["versions"]["llmc"] and result["machine"]["cpu_cores"]
    # Prompts are ids that the server's tokenizer knows, of the length asked for; one warmed up.
    assert len(stub.bodies) == 6
    assert {len(body["prompt"]) for body in stub.bodies} == {7}
    assert {ord(" "), *range(97, 123)} >= {t for body in stub.bodies for t in body["prompt"]}


def test_words_where_ids_can_not_be_had(stub: Stub) -> None:
    stub.has_tokenize = False
    words = ["--random-input-len", "7", "--num-warmups", "0", "--num-prompts", "2"]
    assert main(["bench", "serve", "--base-url", stub.url, *words]) == 0
    assert [len(body["prompt"].split()) for body in stub.bodies] == [7, 7]


def test_a_run_without_success_fails(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.break_stream = True
    code = main(["bench", "serve", "--base-url", stub.url, "--num-prompts", "2",
                 "--num-warmups", "0"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 2
    assert f"{'Failed requests:':<40} 2\n" in out
    assert "2 requests failed; the first: error event" in err and "Traceback" not in err
