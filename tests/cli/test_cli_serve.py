"""`llmc serve` before a model is loaded: a taken port, a wrong directory, what the banner says."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's dependencies are not installed")

from llmc.cli import serve_run
from llmc.cli.main import main
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.server.batch_store import BatchStore
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


def test_folders_that_cannot_be_used_are_known_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_run, "_load_in_process", lambda *_: pytest.fail("model was loaded"))
    nothing, batches = str(tmp_path / "nothing"), tmp_path / "batches"
    other = BatchStore(batches)
    for options, message in (
        (
            ["--lora-modules", f"a={nothing}"],
            "not a directory with an adapter_config.json",
        ),
        (["--runtime-lora-dir", nothing], "is not a directory"),
        (["--batch-dir", str(batches)], "in use by another server"),
    ):
        assert main(["serve", "--port", "0", *options]) == 2
        assert message in capsys.readouterr().err
    other.close()


@pytest.mark.parametrize(
    ("stated", "options", "want"),
    [
        ({"r": 64}, [], 64),
        ({"r": 8, "rank_pattern": {"q_proj": 20, "v_proj": 4}}, [], 20),
        ({"r": 4}, [], 16),
        ({"r": 64}, ["--max-lora-rank", "100"], 100),
        ({"r": 10**6}, [], 512),
        ({"r": "64", "rank_pattern": [1]}, [], 16),
        ([64], [], 16),
    ],
)
def test_adapters_of_the_server_set_its_options(
    stated: Any, options: list[str], want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text('{"r": 2}')
    seen: list[EngineConfig] = []

    def load(run: Any, stack: Any) -> None:
        seen.append(run.config)
        raise ConfigError("that is enough")

    monkeypatch.setattr(serve_run, "_load_in_process", load)
    adapters = [f"a={tmp_path / 'other'}", "--lora-modules", f"b={tmp_path}"]
    assert main(["serve", "--port", "0", "--lora-modules", *adapters, *options]) == 2
    assert [(one.enable_lora, one.max_lora_rank) for one in seen] == [(True, want)]


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


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `llmc serve` would serve: configs by name, and settings."""
    from llmc.cli import serve_several

    seen: list[Any] = []
    monkeypatch.setattr(
        serve_several,
        "run_several",
        lambda configs, settings, **_: seen.append((configs, settings)),
    )
    return seen


def test_several_models_are_named_by_their_directories(
    several: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    words = ["--model-memory", "2G", "--model-idle-timeout", "60", "--max-num-seqs", "3"]
    assert main(["serve", str(one), str(other), "owner/third", *words]) == 0
    [(configs, settings)] = several
    assert list(configs) == ["one", "other", "third"]
    assert configs["other"] == EngineConfig(model=str(other), max_num_seqs=3)
    assert (settings.model_memory, settings.model_idle_timeout_s) == (2 << 30, 60.0)
    assert main(["serve", str(one), str(tmp_path / "x" / "one")]) == 2
    assert "two models would be served as 'one'" in capsys.readouterr().err


def test_models_have_names_and_options_in_a_file(several: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "max-num-seqs: 4\n"
        "models:\n"
        "  small: {model: dir/a}\n"
        "  large: {model: dir/b, max-model-len: 4096, kv-cache-memory: 1G, dtype: bfloat16}\n"
    )
    assert main(["serve", "--config", str(file)]) == 0
    [(configs, _)] = several
    assert configs["small"] == EngineConfig(model="dir/a", max_num_seqs=4)
    assert configs["large"] == EngineConfig(
        model="dir/b",
        max_num_seqs=4,
        max_model_len=4096,
        kv_cache_memory=1 << 30,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "[]"], "must look like"),
        (["--models", "{"], "must be JSON"),
        (["--models", '{"a": {}}'], "'a' must be an object with a model"),
        (
            ["--models", '{"a": {"model": "x", "max-len": 1}}'],
            "'max-len' is not an option",
        ),
        (["--models", '{"a": {"model": "x", "max-num-seqs": "y"}}'], "max-num-seqs must be a"),
        (["m", "--models", '{"a": {"model": "x"}}'], "not both"),
        (["m", "--model-memory", "1G"], "are for several models"),
        (["m", "n", "--served-model-name", "x"], "--served-model-name: not supported"),
        (["m", "n", "--batch-dir", "x", "--api-workers", "2"], "--batch-dir, --api-workers"),
        (["m", "n", "--model-idle-timeout", "0"], "must be more than 0 seconds"),
    ],
)
def test_what_several_models_can_not_have(
    words: list[str], said: str, several: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err and not several
