"""`llmc serve` before a model is loaded: a taken port, a wrong directory, what the banner says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server's dependencies are not installed")

from llmc.cli import serve_run
from llmc.cli.main import main
from llmc.server.settings import ServerSettings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_known_before_the_model_is_loaded(
    taken_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_run, "load_async_llm", lambda *args: pytest.fail("model was loaded"))
    assert main(["serve", "--port", str(taken_port)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: port {taken_port} on 127.0.0.1 is in use")
    assert "--port" in err and "Traceback" not in err


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["chat", "hi", "--model"],
                                     ["bench", "latency"]])  # fmt: skip
def test_a_wrong_directory_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert "nothing" in err.splitlines()[-1] and "Traceback" not in err
    assert main([*command, str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]")],
)
def test_the_url_has_the_port_that_was_chosen(host: str, shown: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert serve_run.url_of(ServerSettings(host=host), sock) == f"http://{shown}:{port}"
        secure = ServerSettings(host=host, ssl_certfile="cert.pem")
        assert serve_run.url_of(secure, sock) == f"https://{shown}:{port}"
