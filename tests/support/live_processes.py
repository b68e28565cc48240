"""A live server in a thread of the test process, on an engine in a separate process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import scripted_process
from scripted_process import wait_for

from llmc.async_llm import AsyncLLM
from llmc.config import EngineConfig
from llmc.errors import EngineDeadError
from llmc.processes.engine_processes import EngineProcesses
from llmc.processes.server_processes import RestartBudget
from llmc.processes.supervisor import Supervisor
from llmc.server.app import create_app
from llmc.server.run import Server, bind_socket
from llmc.server.settings import ServerSettings

PROMPT = [11, 12, 13, 14, 15]  # what the scripted engine repeats


@dataclass(kw_only=True)
class LiveProcesses:
    engines: EngineProcesses
    llm: AsyncLLM
    port: int
    client: httpx.Client
    server: Server
    failures: list[Exception] = field(default_factory=list)

    @property
    def supervisor(self) -> Supervisor:
        return self.engines.supervisors[0]

    @property
    def engine_pid(self) -> int:
        return self.supervisor.processes.pids[self.supervisor.name]

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, **fields}

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=self.body(**fields))

    def check_served(self) -> None:
        """The canary: check that a request is answered correctly."""
        answer = self.complete()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == (PROMPT * 3)[:12]

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def wait_idle(self) -> None:
        wait_for(lambda: self.llm.num_active == 0)
        wait_for(lambda: self._is_empty())

    def _is_empty(self) -> bool:
        stats = self.llm.stats()
        return stats.num_running == stats.num_waiting == 0 and (
            stats.num_free_blocks == stats.num_blocks
        )


@contextlib.contextmanager
def live_processes(
    settings: ServerSettings | None = None,
    *,
    delay_s: float = 0.0,
    budget: RestartBudget | Callable[[], RestartBudget] | None = None,
    command: Sequence[str] | None = None,
    **config: Any,
) -> Iterator[LiveProcesses]:
    options = EngineConfig(**{"max_num_seqs": 8, **config})
    settings = settings or ServerSettings()
    command = scripted_process.command(delay_s) if command is None else command

    def make_budget() -> RestartBudget:
        made = budget() if callable(budget) else budget
        return made or RestartBudget((0.05, 0.05, 0.05))

    with EngineProcesses(options, command=command, budget=make_budget) as engines:
        engine = engines.wait_ready()
        llm = AsyncLLM.from_link(engines.link("api-0"), engine.info, engine.stats, options)
        ready = threading.Event()
        server = Server(create_app(llm, settings, engines), settings, on_ready=ready.set)
        sock = bind_socket("127.0.0.1", 0)
        port = sock.getsockname()[1]
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False)
        live = LiveProcesses(engines=engines, llm=llm, port=port, client=client, server=server)

        def run() -> None:
            server.run(sockets=[sock])
            try:
                server.check()
            except EngineDeadError as exc:
                live.failures.append(exc)

        thread = threading.Thread(target=run, name="server")
        thread.start()
        assert ready.wait(20), "the server did not start"
        try:
            yield live
        finally:
            client.close()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"
            sock.close()
    assert not any(os.path.exists(one.folder) for one in engines.supervisors)
