"""A live server of several models in a thread of the test process, with scripted engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import scripted_process
from scripted_process import wait_for

from llmc.config import EngineConfig
from llmc.processes.engine_processes import EngineProcesses
from llmc.processes.server_processes import RestartBudget
from llmc.server.model_manager import ModelManager, ServedModel
from llmc.server.run import Server, bind_socket
from llmc.server.settings import ServerSettings
from llmc.server.several_models_app import create_several_models_app

PROMPT = [11, 12, 13]  # what the scripted engines repeat


@dataclass(kw_only=True)
class LiveModels:
    manager: ModelManager
    client: httpx.Client
    server: Server

    def complete(self, model: str | None, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, **fields}
        return self.client.post(
            "/v1/completions", json=body if model is None else {**body, "model": model}
        )

    def check_served(self, model: str) -> None:
        answer = self.complete(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == PROMPT * 2
        assert answer.json()["model"] == model

    def states(self) -> dict[str, str]:
        data = self.client.get("/v1/models").json()["data"]
        return {card["id"]: card["state"] for card in data}

    def wait_state(self, model: str, state: str) -> None:
        wait_for(lambda: self.states()[model] == state)


def start_scripted(config: EngineConfig) -> EngineProcesses:
    """A model's directory determines how it fails to start, or the duration of its steps."""
    word = (config.model or "").removeprefix("scripted:")
    delay, failure = (float(word), "") if word.replace(".", "").isdigit() else (0.0, word)
    command = scripted_process.command(delay, failure)
    return EngineProcesses(config, command=command, budget=lambda: RestartBudget((0.05,)))


@contextlib.contextmanager
def live_models(
    models: dict[str, str],
    settings: ServerSettings | None = None,
    *,
    start: Callable[[EngineConfig], EngineProcesses] = start_scripted,
) -> Iterator[LiveModels]:
    """`models`: their directories by name."""
    settings = settings or ServerSettings()
    served = [
        ServedModel(name, EngineConfig(model=directory, max_num_seqs=8))
        for name, directory in models.items()
    ]
    manager = ModelManager(served, settings, start)
    ready = threading.Event()
    server = Server(create_several_models_app(manager, settings), settings, on_ready=ready.set)
    sock = bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    client = httpx.Client(base_url=url, timeout=30, verify=False)
    thread = threading.Thread(target=server.run, args=([sock],), name="server")
    thread.start()
    assert ready.wait(20), "the server did not start"
    try:
        yield LiveModels(manager=manager, client=client, server=server)
    finally:
        client.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
        sock.close()
