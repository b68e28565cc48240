"""The server's own application as a Ray Serve deployment, an engine in each replica.

    client -- Serve's proxy -- replica: ReplicaApp -- create_app -- AsyncLLM -- engine (thread)

Serve routes, scales, restarts and drains; the HTTP API is entirely llmc's. A replica is a single
process, so its engine ends with it, and it exits when its engine is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError, EngineDeadError
from llmc.frontend.engine_options import EngineOptions, make_config
from llmc.integrations.ray.multiplex import add_multiplexing
from llmc.logs import set_up_logging
from llmc.server.app import create_app
from llmc.server.settings import ServerSettings
from llmc.server.throughput import log_throughput

if TYPE_CHECKING:
    from ray.serve import Application

log = logging.getLogger(__name__)

_ENGINE_CHECK_S = 0.5
_LAST_ANSWERS_S = 1.0  # to send errors for requests that failed with the engine
_exit = os._exit
# Fields of ServerSettings that have no meaning, or a wrong one, in one of several replicas.
_SERVE_LISTENS = "Serve's proxy listens; set it in http_options"
_ONE_REPLICA = "it would affect only one of several replicas"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), _SERVE_LISTENS),
    **dict.fromkeys(("idle_connection_s", "max_header_bytes"), _SERVE_LISTENS),
    **dict.fromkeys(("admin_api_key", "runtime_lora_dir", "batch_dir"), _ONE_REPLICA),
    "root_path": "set the application's route_prefix",
    "api_workers": "set num_replicas of the deployment",
    "model_idle_timeout_s": "a deployment serves one model; let Serve scale it to 0",
    "model_memory": "a deployment serves one model",
    "certificate": "run llmc check",
}


def build_app(
    model: str | None = None,
    *,
    server: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    lora_dir: str | None = None,
    **options: Unpack[EngineOptions],
) -> Application:
    """A Serve application with the API of `llmc serve`: `serve.run(build_app("path"))`.

    `model` and `options` are those of `LLM`; `server` has fields of ServerSettings, `deployment`
    arguments of `serve.deployment` (num_replicas, autoscaling_config, ray_actor_options ...). By
    default, a replica gets as many requests as its engine has rows, four times as many can wait in
    each proxy, and a stopping replica has `shutdown_timeout_s` to finish its requests. Without
    `api_keys`, the keys in the replica's LLMC_API_KEY apply.
    Adapters in directories of `lora_dir` are loaded by the model ids of Serve's multiplexing.
    Raises ConfigError for invalid options, here rather than in a replica.
    """
    config = make_config(model, options)
    settings = _settings(server or {})
    if lora_dir is not None and not config.enable_lora:
        raise ConfigError("lora_dir needs enable_lora")
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is needed ({error}): pip install 'llmc-engine[ray]'"
        ) from None

    def make() -> ASGIApp:
        """Called in each replica."""
        set_up_logging("info", "text")
        keys = settings.api_keys or os.environ.get("LLMC_API_KEY", "").split()
        llm = AsyncLLM(model, **options)
        inner = create_app(llm, dataclasses.replace(settings, api_keys=keys))
        if lora_dir is not None:
            most = config.max_cpu_loras or config.max_loras
            cached = serve.multiplexed(max_num_models_per_replica=most)
            add_multiplexing(inner, lora_dir, serve.get_multiplexed_model_id, cached)
        return ReplicaApp(inner)

    defaults = {
        "name": "llmc",
        "max_ongoing_requests": config.max_num_seqs,
        "max_queued_requests": config.max_num_queued or 4 * config.max_num_seqs,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_s,
    }
    ingress = serve.ingress(make)(Replica)
    return serve.deployment(ingress, **{**defaults, **(deployment or {})}).bind()


def app(args: dict[str, Any]) -> Application:
    """`build_app` for the config file of `serve run`: `args` are its arguments, by name."""
    try:
        return build_app(**args)
    except TypeError as error:  # an argument that `make_config` did not see
        raise ConfigError(f"args of llmc.integrations.ray:app: {error}") from None


class Replica:
    """The methods that Serve calls on a replica besides HTTP. `serve.ingress` adds `app`."""

    app: Any

    async def check_health(self) -> None:
        """Raises if only a new replica can respond again; Serve then starts one."""
        llm: AsyncLLM = self.app.llm
        llm.check_health()
        if llm.is_stalled:
            raise EngineDeadError("requests are waiting and the engine makes no progress")


def _settings(given: Mapping[str, Any]) -> ServerSettings:
    known = {field.name for field in dataclasses.fields(ServerSettings)} - set(_REFUSED)
    for name in given:
        if name in _REFUSED:
            raise ConfigError(f"server: {name} can't be set on Ray Serve: {_REFUSED[name]}")
        if name not in known:
            raise ConfigError(
                f"server: there is no setting {name!r}; settings are {', '.join(sorted(known))}"
            )
    # Other replicas serve too, so nothing may be stored here for a later call.
    values = {"access_log": False, **given, "api_workers": 2}
    try:
        return TypeAdapter(ServerSettings).validate_python(values)
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"server: {where + ': ' if where else ''}{first['msg']}") from None


@contextlib.asynccontextmanager
async def _lifespan(inner: Starlette) -> AsyncIterator[None]:
    """Runs from the replica's start until Serve has waited for its last request."""
    llm: AsyncLLM = inner.state.llm
    llm.open()
    tasks = [
        asyncio.create_task(log_throughput(llm.stats)),
        asyncio.create_task(_end_with_engine(llm)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await llm.shutdown()
        if inner.state.tracer is not None:
            await asyncio.to_thread(inner.state.tracer.close)


async def _end_with_engine(llm: AsyncLLM) -> None:
    """Exit if the engine dies: Serve notices that at once, but a health check must fail 3 times."""
    while llm.failure is None:
        await asyncio.sleep(_ENGINE_CHECK_S)
    log.error("the replica is exiting: %s", llm.failure)
    await asyncio.sleep(_LAST_ANSWERS_S)
    _exit(1)


class ReplicaApp:
    """The server's application, adapted to Serve's proxy.

    The route prefix is removed from the path, which the Guard compares with its lists. Our request
    id is removed from the response, since Serve adds the same one.
    """

    def __init__(self, inner: Starlette) -> None:
        self.llm: AsyncLLM = inner.state.llm
        self._inner = inner
        self._inner.router.lifespan_context = _lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await self._inner({**scope, "path": path, "root_path": ""}, receive, without_id)
