"""The wire: limits, headers, keys, foreign hosts, clients that leave or stop reading, draining."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live, live_server, read_answer

from llmc.errors import ConfigError
from llmc.server import run
from llmc.server.app import ROUTES
from llmc.server.errors import FOREIGN_PATHS
from llmc.server.run import bind_socket
from llmc.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    fields = [f"{method} {path} HTTP/1.1", *lines]
    if not any(line.lower().startswith("host:") for line in lines):
        fields.append("Host: 127.0.0.1")
    return ("\r\n".join(fields) + "\r\n\r\n").encode("latin-1")


def json_head(length: int, *lines: str, path: str = COMPLETIONS) -> bytes:
    return head(path, "Content-Type: application/json", f"Content-Length: {length}", *lines)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# ---- row 36: bodies ----


@pytest.fixture(scope="module")
def small() -> Any:
    settings = ServerSettings(max_body_bytes=10_000, body_timeout_s=0.4)
    with live_server(settings) as live:
        yield live


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([json_head(33_000_000)], 413),
        ([json_head(33_000_000), b"{" * 50_000], 413),
        ([json_head(20), b'{"prompt": "count'], 408),
        ([json_head(20, "Expect: 100-continue")], 408),
        ([json_head(10, "Content-Encoding: gzip"), b"\x1f\x8b" + b"0" * 8], 415),
        (
            [
                head(COMPLETIONS, "Content-Type: application/json", "Transfer-Encoding: chunked"),
                *[b"1000\r\n" + b" " * 4096 + b"\r\n"] * 4,
            ],
            413,
        ),
        ([head("/tokenize", "Content-Type: application/json", "Content-Length: 50000000")], 413),
    ],
    ids=["declared", "sent", "short", "expect", "gzip", "endless chunks", "tokenize"],
)
def test_bodies(small: Live, parts: list[bytes], status: int) -> None:
    answer = small.raw(*parts)
    if answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert status_of(answer) == status
    assert error_of(answer)
    assert b"connection: close" in answer.lower()
    assert small.complete().status_code == 200
    small.wait_idle()


def test_body_at_the_limit_is_taken(small: Live) -> None:
    body = json.dumps({"prompt": "count", "max_tokens": 3}).encode().ljust(10_000)
    answer = small.client.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    answer = small.client.post(
        COMPLETIONS, content=body + b" ", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


# ---- row 37: paths and media types ----


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([head(COMPLETIONS, "Content-Length: 2"), b"{}"], 415, "unsupported_media_type"),
        (
            [head(COMPLETIONS, "Content-Type: text/xml", "Content-Length: 2"), b"{}"],
            415,
            "unsupported_media_type",
        ),
        ([head(COMPLETIONS, method="GET")], 405, "method_not_allowed"),
        ([head("/v1/models", "Content-Length: 0")], 405, "method_not_allowed"),
        ([head("/nothing", method="GET")], 404, "not_found"),
        ([head("//v1/../health", method="GET")], 404, "not_found"),
        ([head("/%2e%2e/health", method="GET")], 404, "not_found"),
        ([head("/v1/models/other/", method="GET")], 404, "model_not_found"),
        ([head("/v1/", method="GET")], 404, "not_found"),
        ([head("/health/", method="GET")], 404, "not_found"),
    ],
)
def test_paths(live: Live, parts: list[bytes], status: int, code: str) -> None:
    answer = live.raw(*parts)
    assert (status_of(answer), error_of(answer)["code"]) == (status, code)
    assert b"x-request-id: " in answer


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/chat/completions/", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/slots", "/metrics"),  # llama.cpp's server
        ("/flush_cache/", "/reset_prefix_cache"),  # SGLang's
        ("/nothing", None),
    ],
)
def test_a_wrong_base_url_is_told_the_path(live: Live, path: str, meant: str | None) -> None:
    error = live.post(path, {}).json()["error"]
    hint = f"; did you mean {meant}?" if meant else ""
    assert error["message"] == f"no such path: POST {path!r}{hint}"


def test_paths_of_other_servers_lead_to_ours() -> None:
    ours = {path for _, path, _ in ROUTES}
    assert set(FOREIGN_PATHS.values()) <= ours and ours.isdisjoint(FOREIGN_PATHS)


def test_a_slash_at_the_end_of_a_path_of_the_api_is_ignored(live: Live) -> None:
    assert live.client.get("/v1/models/").json() == live.client.get("/v1/models").json()
    answer = live.post("/v1/completions/", {"prompt": "Hello", "max_tokens": 1})
    assert answer.status_code == 200


# ---- row 38: broken HTTP ----


@pytest.mark.parametrize(
    "raw",
    [
        head("/health", "X-Long: " + "x" * 1_000_000, method="GET"),
        head("/health", *[f"X-{i}: y" for i in range(10_000)], method="GET"),
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        head(COMPLETIONS, "Content-Length: 5", "Content-Length: 9"),
        b"GET /health HTTP/1.1\r\n\r\n",
    ],
    ids=["long", "many", "bare cr", "0.9", "tls", "tls lines", "two lengths", "no host"],
)
def test_broken_http_is_refused(live: Live, raw: bytes) -> None:
    with live.connect(timeout=3) as sock:
        try:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            answer = read_answer(sock)
        except OSError:
            answer = b""
    assert answer == b"" or status_of(answer) in (400, 431)
    assert live.client.get("/health").status_code == 200


CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")
BODY = b'{"prompt": "count"}'
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([b"GET /health\r\n\r\n"], 400, "invalid_http"),
        ([b"GET /health HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
        ([head("/health", "X-Long: " + "x" * 100_000, method="GET")], 431, "headers_too_large"),
        ([head("/health", "Content-Length: x")], 400, "invalid_http"),
        ([head(COMPLETIONS, "Transfer-Encoding: gzip")], 501, "not_implemented"),
        ([head(COMPLETIONS, *CHUNKED) + b"zz\r\n"], 400, "invalid_http"),
        ([head(COMPLETIONS, *CHUNKED), b"zz\r\n"], 400, "invalid_http"),
        # Where does this request end? The rest would be the next one.
        ([head(COMPLETIONS, *CHUNKED, "Content-Length: 4") + CHUNKS], 400, "invalid_http"),
        ([head(COMPLETIONS, "Content-Length: 4", *CHUNKED) + CHUNKS], 400, "invalid_http"),
        (
            [head(COMPLETIONS, *CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0") + CHUNKS],
            *(400, "invalid_http"),
        ),
    ],
)
def test_malformed_http_gets_an_error_like_any_other(
    live: Live, caplog: pytest.LogCaptureFixture, parts: list[bytes], status: int, code: str
) -> None:
    with live.connect() as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(0.05)
        sock.sendall(head("/v1/models", method="GET"))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(65536):  # up to the end of the connection
                answer += chunk
    head_, _, body = answer.partition(b"\r\n\r\n")
    told = json.loads(body)  # one response, though another request follows
    assert (status_of(answer), told["error"]["code"]) == (status, code), answer
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert f"x-request-id: {told['request_id']}".encode() in head_ and b"close" in head_
    assert head_.split(b" ", 2)[2].strip() and b"\r\ndate: " in head_
    assert "bytearray" not in told["error"]["message"]
    assert not [one for one in caplog.records if one.exc_info], "no tracebacks"


def test_malformed_http_in_the_format_of_the_path(live: Live) -> None:
    answer = live.raw(head("/v1/messages", *CHUNKED), b"zz\r\n", pause=0.05)
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_a_bad_chunk_after_the_answer_only_closes(
    locked: Live, caplog: pytest.LogCaptureFixture
) -> None:
    answer = locked.raw(head(COMPLETIONS, *CHUNKED), b"zz\r\n", pause=0.1)
    assert status_of(answer) == 401
    locked.raw(head(COMPLETIONS, *CHUNKED) + b"zz\r\n")
    assert not [one for one in caplog.records if one.exc_info], caplog.text


def test_chunks_alone_are_fine(live: Live) -> None:
    assert status_of(live.raw(head(COMPLETIONS, *CHUNKED) + CHUNKS)) == 200


# ---- row 39: foreign hosts ----


@pytest.mark.parametrize("host", ["evil.example", "evil/health?x", "127.0.0.1.evil.example:80", ""])
def test_foreign_host_is_refused_on_loopback(live: Live, host: str) -> None:
    answer = live.raw(head("/v1/models", f"Host: {host}", method="GET"))
    assert status_of(answer) == 403
    assert error_of(answer)["code"] == "host_not_allowed"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil"])
def test_cross_site_request_is_refused(live: Live, origin: str) -> None:
    answer = live.client.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8000"])
def test_own_names_pass(live: Live, host: str) -> None:
    answer = live.client.get(
        "/v1/models", headers={"host": host, "origin": "http://localhost:3000"}
    )
    assert answer.status_code == 200


# ---- row 40: keys ----


@pytest.fixture(scope="module")
def locked() -> Any:
    with live_server(ServerSettings(api_keys=("first-key", "zweit\u00e4r"))) as live:
        yield live


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": "Basic Zmlyc3Qta2V5"},
        {"authorization": "first-key"},
        {"authorization": "Bearer first-key x"},
        {"authorization": "Bearer \u00fc\u00fc\u00fc"},
        {"authorization": "Bearer " + "k" * 50_000},
        {"x-api-key": ""},
        {"x-api-key": "First-key"},
    ],
)
def test_wrong_keys(locked: Live, headers: dict[str, str]) -> None:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    answer = locked.raw(head("/v1/models", *lines, method="GET"))
    assert status_of(answer) == 401
    assert b"www-authenticate: Bearer" in answer
    assert error_of(answer)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", COMPLETIONS, "/v1/chat/completions", "/metrics", "/version", "/tokenize"),
        *("/detokenize", "/tokenizer_info", "/docs/", "/openapi.json", "/nothing", "/health/x"),
        *("/v1/models?/health", "//health", "/health%3f", "/./health"),
    ],
)
def test_everything_else_needs_a_key(locked: Live, path: str) -> None:
    for host in ("127.0.0.1", "evil/health?x"):
        for method in ("GET", "POST"):
            answer = locked.raw(head(path, f"Host: {host}", "Content-Length: 0", method=method))
            assert status_of(answer) == 401, (path, method, host)


def test_right_keys_and_public_paths(locked: Live) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert httpx.get(f"http://127.0.0.1:{locked.port}{path}").status_code == 200
    assert locked.client.get("/v1/models").status_code == 200
    for line in ("x-api-key: first-key", "Authorization: bearer first-key"):
        assert status_of(locked.raw(head("/v1/models", line, method="GET"))) == 200
    second = "x-api-key: zweit\u00e4r".encode()
    raw = b"GET /v1/models HTTP/1.1\r\nHost: anything\r\n" + second + b"\r\n\r\n"
    assert status_of(locked.raw(raw)) == 200


# ---- row 41: slow heads ----


def test_slow_head_is_cut(monkeypatch: pytest.MonkeyPatch, live: Live) -> None:
    monkeypatch.setattr(run, "HEAD_TIMEOUT_S", 0.3)
    with live.connect(timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert sock.recv(100) == b""
    with live.connect(timeout=5) as sock:  # the same after a first, good request
        sock.sendall(head("/health", method="GET"))
        assert status_of(read_answer(sock)) == 200
        sock.sendall(b"GET /he")
        assert sock.recv(100) == b""


def test_a_slow_head_is_cut_after_many_requests(
    monkeypatch: pytest.MonkeyPatch, live: Live
) -> None:
    monkeypatch.setattr(run, "HEAD_TIMEOUT_S", 0.3)
    with live.connect(timeout=5) as sock:
        for _ in range(8):  # longer than the time-out
            sock.sendall(head("/health", method="GET"))
            assert status_of(read_answer(sock)) == 200
            time.sleep(0.06)
        sock.sendall(b"GET /he")
        assert sock.recv(100) == b""


def test_nothing_keeps_a_connection_that_is_over(live: Live) -> None:
    for _ in range(20):
        assert live.raw(head("/health", "Connection: close", method="GET"))
    wait_for(lambda: num_connections() < 5)  # the test's own client has some


def num_connections() -> int:
    gc.collect()
    return sum(isinstance(one, run.Connection) for one in gc.get_objects())


# ---- row 43: the queue ----


def test_full_queue_is_429_with_retry_after() -> None:
    with live_server(max_num_seqs=1, max_num_queued=2) as live:
        live.scripted.runner.delay_s = 0.01
        busy = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(live.complete(**busy).status_code))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.llm.num_active == 3)
        refused = live.complete()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        count = {"messages": [{"role": "user", "content": "x"}]}
        assert live.post("/tokenize", count).status_code == 200, "it needs no room in the queue"
        for thread in threads:
            thread.join()
        assert statuses == [200] * 3
        assert live.complete().status_code == 200
        live.wait_idle()
        rejected = 'llmc:admission_rejections_total{model_name="scripted",reason="queue_full"} 1.0'
        assert rejected in live.client.get("/metrics").text


# ---- row 44: clients that leave ----


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def slow() -> Any:
    with live_server(max_num_seqs=2) as live:
        live.scripted.runner.delay_s = 0.02
        yield live


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_frees_everything_within_a_step_or_two(slow: Live, stream: bool, n: int) -> None:
    body = json.dumps({**ENDLESS, "stream": stream, "n": n}).encode()
    with slow.connect() as sock:
        sock.sendall(json_head(len(body)) + body)
        if stream:
            assert sock.recv(1000)
        wait_for(lambda: slow.scripted.engine.stats().num_running > 0)
    before = slow.scripted.runner.num_steps
    slow.wait_idle()
    assert slow.scripted.runner.num_steps - before <= 4
    assert slow.llm.num_active == 0


def num_aborted(live: Live) -> float:
    name = r'request_success_total\{finished_reason="abort",.*\} (.+)'
    return float(re.findall(name, live.client.get("/metrics").text)[0])


def test_leaving_the_queue(slow: Live) -> None:
    body = json.dumps({**ENDLESS, "n": 2}).encode()
    before = num_aborted(slow)
    sockets = [slow.connect() for _ in range(5)]
    for sock in sockets:
        sock.sendall(json_head(len(body)) + body)
    wait_for(lambda: slow.llm.num_active == 5)
    for sock in sockets:
        sock.close()
    slow.wait_idle()
    assert slow.complete(max_tokens=5).status_code == 200
    assert num_aborted(slow) - before == 10  # also those that had not begun


def test_survivors_are_not_disturbed(slow: Live) -> None:
    golden = slow.complete().json()["choices"]
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(slow.complete().json()["choices"]))
    with slow.connect() as sock:
        sock.sendall(json_head(len(body)) + body)
        assert sock.recv(100)
        thread.start()
        wait_for(lambda: slow.llm.num_active == 2)
    thread.join()
    assert answers == [golden]
    slow.wait_idle()


def test_a_request_for_another_protocol_is_answered_and_not_logged(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    with caplog.at_level("WARNING"):
        assert live.client.get("/v1/models", headers=wanted).status_code == 200
    assert "pgrade" not in caplog.text and "WebSocket" not in caplog.text


def test_leaving_inside_the_body(live: Live) -> None:
    with live.connect() as sock:
        sock.sendall(json_head(100) + b'{"prompt"')
    assert live.complete().status_code == 200


# ---- rows 45, 46, and keep-alive comments ----


@pytest.mark.parametrize("stream", [True, False])
def test_stalled_reader_is_cut_and_its_request_aborted(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(stalled_reader_s=0.3)
    with live_server(settings, max_model_len=100_000, num_blocks=8000) as live:
        num_tokens = 90_000 if stream else 15_000  # a body is sent when it is complete: 6 MB
        body = long_body(num_tokens, stream=stream)
        connections = live.server.server_state.connections
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", live.port))
            sock.sendall(json_head(len(body)) + body)
            wait_for(lambda: live.llm.num_active == 1)
            wait_for(lambda: live.llm.num_active == 0, seconds=30)
            live.wait_idle()
            wait_for(lambda: not connections, seconds=10)
            num_generated = live.scripted.engine.stats().num_generated_tokens
            assert num_generated < 90_000 if stream else num_generated == 15_000
        assert live.complete().status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_slow_reader_gets_everything() -> None:
    settings = ServerSettings(stalled_reader_s=0.4)
    with live_server(settings, max_model_len=100_000, num_blocks=8000) as live:
        body = long_body(15_000, stream=False)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.settimeout(30)
            sock.connect(("127.0.0.1", live.port))
            sock.sendall(json_head(len(body), "Connection: close") + body)
            text, begun = sock.recv(65536), time.monotonic()
            while chunk := sock.recv(65536):
                text += chunk
                if time.monotonic() - begun < 2:  # of the first MB: less than the system buffers
                    time.sleep(0.1)
        [choice] = json.loads(text.partition(b"\r\n\r\n")[2])["choices"]
        assert len(choice["logprobs"]["tokens"]) == 15_000


def long_body(num_tokens: int, *, stream: bool) -> bytes:
    fields = {"max_tokens": num_tokens, "stream": stream, "logprobs": 20}
    return json.dumps({**ENDLESS, **fields}).encode()


def test_quiet_stream_gets_comments() -> None:
    with live_server(ServerSettings(keep_alive_s=0.05)) as live:
        live.scripted.runner.delay_s = 0.2
        body = {"prompt": "count", "max_tokens": 2, "stream": True}
        text = live.post(COMPLETIONS, body).text
        assert text.startswith(": keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")
        live.wait_idle()


def test_connection_is_reused_and_requests_may_be_pipelined(live: Live) -> None:
    body = json.dumps({"prompt": "count", "max_tokens": 4}).encode()
    with live.connect() as sock:
        sock.sendall((json_head(len(body)) + body) * 2)
        answers = b""
        while answers.count(b"one two three four") < 2:
            chunk = sock.recv(65536)
            assert chunk, answers
            answers += chunk
    assert answers.count(b"HTTP/1.1 200") == 2


# ---- start and end ----


def test_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use by process"):
            bind_socket("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
def test_bad_address_is_a_config_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="can't listen on"):
        bind_socket(host, port)


def test_a_body_that_never_comes_holds_up_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with live_server() as live:
        sock = live.connect()
        sock.sendall(json_head(100) + b'{"prompt"')
        # answered, so the server has the other request's headers too
        assert live.client.get("/health").status_code == 200
        live.server.should_exit = True
        begun = time.monotonic()
        live.thread.join(10)
        took = time.monotonic() - begun
    with sock:
        answer = read_answer(sock)
    assert took < run.READERS_S, f"it ended after {took:.1f} s"
    assert status_of(answer) == 503
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_shutdown_cuts_is_told_so(stream: bool) -> None:
    """Clients send it again, to the next server: it did not make the engine fail."""
    with live_server(ServerSettings(shutdown_timeout_s=0.05)) as live:
        live.scripted.runner.delay_s = 0.05
        answers: list[httpx.Response] = []
        body = {**ENDLESS, "stream": stream}
        ask = threading.Thread(target=lambda: answers.append(live.post(COMPLETIONS, body)))
        ask.start()
        wait_for(lambda: live.llm.num_active == 1)
        time.sleep(0.2)  # a stream has begun
        live.server.end()
        ask.join(10)
        live.thread.join(10)
    [answer] = answers
    if stream:
        *_, last, done = answer.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503 and "retry-after" in answer.headers
        error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("shutting_down", "server_error")
    assert "was shut down" in error["message"]


def test_a_reader_that_stops_is_dropped_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(max_model_len=100_000, num_blocks=8000) as live, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", live.port))
        body = long_body(90_000, stream=True)
        sock.sendall(json_head(len(body)) + body)
        connections = live.server.server_state.connections
        wait_for(lambda: any(one.flow.write_paused for one in connections), seconds=30)
        live.server.should_exit = True
        live.thread.join(10)
        assert not live.thread.is_alive()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


SERVE = """
import sys
sys.path.insert(0, {support!r})
from scripted_engine import make_scripted
from llmc.async_llm import AsyncLLM
from llmc.server.app import create_app
from llmc.server.run import bind_socket, serve
from llmc.server.settings import ServerSettings
scripted = make_scripted()
scripted.runner.delay_s = 0.02
settings = ServerSettings(shutdown_timeout_s={timeout})
llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)
sock = bind_socket("127.0.0.1", 0)
ready = lambda: print(sock.getsockname()[1], flush=True)
serve(create_app(llm, settings), settings, sock, on_ready=ready)
"""


def start_process(timeout: float) -> tuple[subprocess.Popen[str], str]:
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE.format(support=support, timeout=timeout)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.mark.e2e
@pytest.mark.parametrize("second", [False, True], ids=["drained", "second signal"])
def test_sigterm(second: bool) -> None:
    process, url = start_process(timeout=30)
    try:
        answers: list[Any] = []
        body = {**ENDLESS, "max_tokens": 240 if second else 80}

        def ask() -> None:
            answers.append(httpx.post(url + COMPLETIONS, json=body, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(
            lambda: (
                'num_requests_running{model_name="scripted"} 1.0'
                in httpx.get(url + "/metrics", verify=False).text
            )
        )
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(url + "/ready", verify=False).status_code == 503)
        refused = httpx.post(url + COMPLETIONS, json=ENDLESS)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "shutting_down"
        if second:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        thread.join()
        assert answers[0].status_code == (503 if second else 200)
        if second:
            assert answers[0].json()["error"]["code"] == "shutting_down"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
