"""`--uds`: the API on a socket in the file system, and what may stand in its way."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest
from scripted_engine import REPLY, make_scripted

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError
from llmc.server.app import create_app
from llmc.server.run import Server
from llmc.server.settings import ServerSettings
from llmc.server.unix_socket import unix_socket


def test_requests_are_answered_on_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "llmc.sock")
    scripted = make_scripted()
    llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
    settings = ServerSettings(uds=path)
    ready = threading.Event()
    server = Server(create_app(llm, settings), settings, on_ready=ready.set)
    with unix_socket(path) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        assert ready.wait(10), "the server did not start"
        try:
            transport = httpx.HTTPTransport(uds=path)
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                body = {"prompt": "x", "max_tokens": 100}
                answer = client.post("/v1/completions", json=body).json()
        finally:
            server.should_exit = True
            thread.join(15)
    assert answer["choices"][0]["text"] == REPLY
    assert not Path(path).exists()


def test_a_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "old.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as old:
        old.bind(path)
    with unix_socket(path) as sock:
        assert sock.getsockname() == path


def test_a_socket_in_use_is_refused_and_left(tmp_path: Path) -> None:
    path = str(tmp_path / "used.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as used:
        used.bind(path)
        used.listen()
        with pytest.raises(ConfigError, match="another server is listening on"), unix_socket(path):
            raise AssertionError("not reached")
        assert Path(path).exists()


def test_a_file_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"), unix_socket(str(path)):
        raise AssertionError("not reached")
    assert path.read_text() == "mine"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere" / "llmc.sock")
    with pytest.raises(ConfigError, match="check --uds"), unix_socket(path):
        raise AssertionError("not reached")
