"""A live server on 127.0.0.1 over the scripted engine, in a thread of the test process."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from scripted_engine import Scripted, make_scripted

from llmc.async_llm import AsyncLLM
from llmc.server.app import create_app
from llmc.server.run import Server, bind_socket
from llmc.server.settings import ServerSettings


@dataclass(kw_only=True)
class Live:
    scripted: Scripted
    llm: AsyncLLM
    server: Server
    port: int
    client: httpx.Client
    thread: threading.Thread

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "count", "max_tokens": 100, **fields})

    def chat(self, content: Any = "count", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            text = response.read().decode("utf-8")  # strict: no half characters
        blocks = text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        lines = [block for block in blocks[:-2] if not block.startswith(":")]
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) for line in lines]

    def raw(self, *parts: bytes, pause: float = 0.0, timeout: float = 10.0) -> bytes:
        """The server's response to these bytes, until it closes the connection or is silent."""
        with self.connect(timeout) as sock:
            for part in parts:
                try:
                    sock.sendall(part)
                except OSError:
                    break  # closed on us: its answer may still be there
                time.sleep(pause)
            return read_answer(sock)

    def connect(self, timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Wait until all requests are over and all blocks free; fails if that takes too long."""
        engine = self.scripted.engine
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = engine.stats()
            # The engine alone is idle, too, before it has taken a request from its queue.
            is_idle = self.llm.num_active == 0 and not engine.has_work
            if is_idle and stats.num_free_blocks == stats.num_blocks:
                engine.check()
                return
            time.sleep(0.005)
        raise AssertionError(f"something is left in the engine: {engine.stats()}")


def read_answer(sock: socket.socket) -> bytes:
    """One complete HTTP response, or whatever arrived before the connection closed."""
    data = b""
    while True:
        head, found, rest = data.partition(b"\r\n\r\n")
        if found:
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                None,
            )
            if length is not None and len(rest) >= length and not head.startswith(b"HTTP/1.1 100"):
                return data
        try:
            chunk = sock.recv(65536)
        except ConnectionResetError:
            return data
        if not chunk:
            return data
        data += chunk


@contextlib.contextmanager
def live_server(
    settings: ServerSettings | None = None,
    *,
    over: Any = None,
    port: int = 0,
    **engine_options: Any,
) -> Iterator[Live]:
    """`over`: an existing object like a Scripted."""
    scripted = over or make_scripted(**engine_options)
    settings = settings or ServerSettings()
    llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
    ready = threading.Event()
    server = Server(create_app(llm, settings), settings, on_ready=ready.set)
    sock = bind_socket("127.0.0.1", port)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([sock],), name="server")
    thread.start()
    assert ready.wait(10), "the server did not start"
    headers = {"authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
    url = f"{settings.scheme}://127.0.0.1:{port}"
    # HTTPS: the certificate is the test's own, and trusted
    cert = settings.ssl_certfile
    # without HTTPS no certificates are read, which takes longer than most tests
    verify: Any = False if cert is None else ssl.create_default_context(cafile=cert)
    client = httpx.Client(base_url=url, headers=headers, timeout=60, verify=verify)
    live = Live(scripted=scripted, llm=llm, server=server, port=port, client=client, thread=thread)
    try:
        yield live
    finally:
        client.close()
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"
