"""What a replica on Ray Serve answers, and which options an application may have: without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="the server's dependencies are not installed")

from fake_adapters import Loader
from scripted_engine import REPLY, make_scripted
from starlette.applications import Starlette

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError, EngineDeadError
from llmc.frontend.engine_link import EngineLost
from llmc.integrations.ray import serve as module
from llmc.integrations.ray.multiplex import Load, add_multiplexing
from llmc.integrations.ray.serve import Replica, ReplicaApp, _settings, app, build_app
from llmc.server.app import create_app

PREFIX = "/llm"


class _Proxy:
    """Serve's: it leaves the route prefix on the path, and names it in root_path."""

    def __init__(self, inner: ReplicaApp, prefix: str) -> None:
        self._inner, self._prefix = inner, prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._inner({**scope, "root_path": self._prefix}, receive, send)


def run(
    do: Callable[[httpx.AsyncClient, ReplicaApp], Awaitable[None]],
    prefix: str = PREFIX,
    *,
    prepare: Callable[[Starlette], None] = lambda inner: None,
    engine: Mapping[str, Any] | None = None,
    **server: Any,
) -> None:
    async def main() -> None:
        scripted = make_scripted(**(engine or {}))
        llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
        inner = create_app(llm, _settings(server))
        prepare(inner)
        replica = ReplicaApp(inner)
        transport = httpx.ASGITransport(app=_Proxy(replica, prefix))
        said: list[str] = []
        orders: asyncio.Queue[dict[str, str]] = asyncio.Queue()

        async def send(message: Any) -> None:
            said.append(message["type"])

        orders.put_nowait({"type": "lifespan.startup"})
        lifespan = asyncio.create_task(replica({"type": "lifespan"}, orders.get, send))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                await do(http, replica)
        finally:
            orders.put_nowait({"type": "lifespan.shutdown"})
            await lifespan
        assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert not llm.is_alive

    asyncio.run(main())


@pytest.mark.parametrize("prefix", ["", PREFIX, "/v1"])
def test_routes_are_found_below_the_route_prefix(prefix: str) -> None:
    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        answer = await http.post(f"{prefix}/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == REPLY
        assert (await http.get(prefix or "/")).headers["content-type"].startswith("text/html")
        assert (await http.get(f"{prefix}/nothing")).status_code == 404

    run(ask, prefix)


def test_the_guard_sees_paths_without_the_prefix() -> None:
    """Else the operator's routes would be taken for a client's."""

    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        assert (await http.get(PREFIX + "/health")).status_code == 200  # public
        assert (await http.get(PREFIX + "/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer one"
        assert (await http.get(PREFIX + "/v1/models")).status_code == 200
        for path in ("/server_info", "/load"):
            assert (await http.get(PREFIX + path)).json()["error"]["code"] == "admin_api_disabled"

    run(ask, api_keys=["one"])


def test_another_host_is_refused_unless_the_settings_say_otherwise() -> None:
    async def refused(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        answer = await http.get(PREFIX + "/v1/models", headers={"host": "llm.example"})
        assert answer.status_code == 403

    async def taken(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        answer = await http.get(PREFIX + "/v1/models", headers={"host": "llm.example"})
        assert answer.status_code == 200

    run(refused)
    run(taken, host="0.0.0.0")


def test_answers_have_no_request_id_of_ours_since_serve_adds_it() -> None:
    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        answer = await http.get(PREFIX + "/nothing", headers={"x-request-id": "r1"})
        assert "x-request-id" not in answer.headers
        assert answer.json()["request_id"] == "r1"

    run(ask)


def test_a_replica_is_unhealthy_when_its_engine_is_dead_or_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        asked = Replica()
        asked.app = replica
        await asked.check_health()
        with monkeypatch.context() as patch, pytest.raises(EngineDeadError, match="no progress"):
            patch.setattr(AsyncLLM, "is_stalled", True)
            await asked.check_health()
        await replica.llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await asked.check_health()

    run(ask)


def test_a_replica_ends_when_its_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(module, "_exit", codes.append)
    monkeypatch.setattr(module, "_LAST_ANSWERS_S", 0.0)
    monkeypatch.setattr(module, "_ENGINE_CHECK_S", 0.01)

    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        await asyncio.sleep(0.1)
        assert codes == []
        replica.llm._on_event(EngineLost(reason="a test killed it", is_final=True))
        answer = await http.get(PREFIX + "/health")
        assert answer.status_code == 503
        await asyncio.sleep(0.1)
        assert codes == [1]

    run(ask)


def test_adapters_are_loaded_by_the_id_of_serves_multiplexing(tmp_path: Path) -> None:
    for name in ("poems", "refused"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    wanted, asked = "", []

    def cached(load: Load) -> Load:
        async def counted(name: str) -> object:
            asked.append(name)
            return await load(name)

        return counted

    def prepare(inner: Starlette) -> None:
        add_multiplexing(inner, str(tmp_path / "adapters"), lambda: wanted, cached)

    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        nonlocal wanted

        async def complete(model: str) -> httpx.Response:
            body = {"model": model, "prompt": "hello", "max_tokens": 3}
            return await http.post(PREFIX + "/v1/completions", json=body)

        wanted = "poems"
        assert (await complete("poems")).status_code == 401  # the key comes first
        assert asked == []
        http.headers["authorization"] = "Bearer one"
        for _ in range(2):
            assert (await complete("poems")).json()["model"] == "poems"
        assert asked == ["poems", "poems"]
        wanted = ""
        assert (await complete("poems")).status_code == 200
        for wanted in ("nowhere", "../outside", "..", "\0", "a" * 300):
            answer = await complete("poems")
            assert answer.status_code == 404, wanted
            assert answer.json()["error"]["code"] == "model_not_found"
        assert asked == ["poems", "poems"]
        wanted = "refused"  # by the engine
        assert (await complete("refused")).json()["error"]["message"] == "no such adapter"

    engine = {"adapters": Loader(2)}
    run(ask, prepare=prepare, engine=engine, api_keys=["one"])


def test_nothing_is_kept_for_a_later_call_which_another_replica_may_get() -> None:
    async def ask(http: httpx.AsyncClient, replica: ReplicaApp) -> None:
        first = await http.post(PREFIX + "/v1/responses", json={"input": "count"})
        assert first.status_code == 200
        body = {"input": "on", "previous_response_id": first.json()["id"]}
        assert (await http.post(PREFIX + "/v1/responses", json=body)).status_code == 400

    run(ask)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"port": 1}, "port can't be set on Ray Serve: Serve's proxy listens"),
        ({"batch_dir": "b"}, "batch_dir can't be set .* one of several replicas"),
        ({"api_workers": 2}, "set num_replicas"),
        ({"ports": 1}, "no setting 'ports'; settings are access_log, "),
        (
            {"api_keys": "secret"},
            "server: api_keys: 'str' instances are not allowed",
        ),  # not seven keys of one letter
        ({"body_timeout_s": "soon"}, "server: body_timeout_s: .*number"),
        ({"lora_modules": ["poems"]}, "server: lora_modules: .*dictionary"),
        ({"allowed_origins": ["nowhere"]}, "allowed origin 'nowhere' must be"),
    ],
)
def test_settings_that_cannot_be_are_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_app("model", server=server)


def test_options_that_cannot_be_are_refused_before_there_is_a_replica() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        build_app("model", max_num_seq=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_num_seqs must be a positive integer"):
        app({"model": "model", "max_num_seqs": 0})
    with pytest.raises(ConfigError, match="lora_dir needs enable_lora"):
        app({"model": "model", "lora_dir": "adapters"})
    with pytest.raises(ConfigError, match="data_parallel_size 2 is for llmc serve"):
        app({"model": "model", "data_parallel_size": 2})
