"""Several models on one server: loaded when requested, unloaded when idle.

    unloaded --a request--> loading --> loaded --idle, or its memory is needed--> unloaded
                               \\--> failed: its error, until a later request tries again

Each loaded model has its own engine processes and its own application (app.py). Everything that the
models share is in several_models_app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Literal

from starlette.applications import Starlette

from llmc.async_llm import AsyncLLM
from llmc.config import EngineConfig
from llmc.engine.messages import EngineStats
from llmc.errors import LlmcError, QueueFullError
from llmc.frontend.data_parallel import sum_stats
from llmc.frontend.engine_options import load_tokenizer, preload_tokenizer
from llmc.processes.engine_processes import EngineProcesses
from llmc.processes.server_processes import EngineUp
from llmc.server.app import create_app
from llmc.server.errors import ApiError
from llmc.server.responses_store import ResponseStore
from llmc.server.settings import ServerSettings
from llmc.startup.model_files import locate
from llmc.text.tokenizer import Tokenizer
from llmc.weights.gguf.files import all_parts

log = logging.getLogger(__name__)
# All of an absolute path but its last name: clients need not know where the models are stored.
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^/\s'\"]+/)*")

ModelState = Literal["unloaded", "loading", "loaded", "asleep", "failed"]
StartEngines = Callable[[EngineConfig], EngineProcesses]  # a context manager, not yet entered

RETRY_S = 10.0  # after a failure, before another request may try again
ROOM_S = 30.0  # how long a request waits for others to end, so that their model can be unloaded
TICK_S = 0.5
PROCESS_BYTES = 300 << 20  # of an engine process without a model: mostly torch
MEASURE_S = 10.0  # between two measurements of the memory of all models


class ServedModel:
    """One model of the server. Its application is created when it is first loaded."""

    def __init__(self, name: str, config: EngineConfig, error: str = "") -> None:
        self.name = name
        self.config = config
        self.error = error  # why the last load failed; shown to clients
        self.failed_at = time.monotonic() if error else 0.0
        self.used_at = 0.0
        self.num_users = 0  # requests that are being served
        self.is_loading = False
        self.memory_bytes = 0  # as last measured
        self.engines: EngineProcesses | None = None
        self.app: Starlette | None = None

    @property
    def max_waiting(self) -> int:
        """How many requests may wait for it to load."""
        config = self.config
        return config.max_num_queued or 4 * config.max_num_seqs * config.data_parallel_size

    @property
    def llm(self) -> AsyncLLM | None:
        return None if self.app is None else self.app.state.llm

    @property
    def is_loaded(self) -> bool:
        """Whether it has engine processes, even if they are just being restarted."""
        return self.state in ("loaded", "asleep")

    @property
    def state(self) -> ModelState:
        if self.is_loading:
            return "loading"
        if self.error:
            return "failed"
        if self.app is None:
            return "unloaded"
        if self.app.state.sleeper.level:
            return "unloaded" if self.app.state.sleeper.is_unloaded else "asleep"
        return "loaded"

    def is_idle(self) -> bool:
        return self.state == "loaded" and not self.num_users

    async def load(
        self, start: StartEngines, settings: ServerSettings, responses: ResponseStore
    ) -> None:
        """Load or wake the model; raises if it can't be. `responses` is shared by all models."""
        if self.app is not None:
            await self.app.state.sleeper.wake_up()
            return
        engines, engine, tokenizer = await asyncio.to_thread(self._start, start)
        llm = AsyncLLM.from_link(
            engines.link("api-0"), engine.info, engine.stats, self.config, tokenizer
        )
        own = dataclasses.replace(settings, served_model_names=(self.name,), batch_dir=None)
        app = create_app(llm, own, engines)
        app.state.responses = responses
        self.app = app
        llm.open()

    def _start(self, start: StartEngines) -> tuple[EngineProcesses, EngineUp, Tokenizer | None]:
        engines = self.engines = start(self.config)  # set early, so that `close` can stop it
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(engines)
                preload_tokenizer(self.config)  # while the engine loads
                engine = engines.wait_ready()
                tokenizer = load_tokenizer(self.config, engine.info)
                stack.pop_all()
        except BaseException:
            self.engines = None
            raise
        return engines, engine, tokenizer

    async def unload(self) -> None:
        """Stop its engine processes; the next request restarts them."""
        assert self.app is not None, "it is loaded"
        await self.app.state.sleeper.unload()

    async def close(self) -> None:
        """Stop its application and engine processes."""
        app, engines = self.app, self.engines
        self.app = self.engines = None
        if app is not None:
            await app.state.llm.shutdown()
            if app.state.tracer is not None:
                await asyncio.to_thread(app.state.tracer.close)
        if engines is not None:
            await asyncio.to_thread(engines.stop)

    async def measure(self) -> int:
        """Bytes that its engine processes use: memory counted by the system, plus that on GPUs."""
        if self.is_loading:
            return self.expected_bytes()
        llm, engines = self.llm, self.engines
        if llm is None or engines is None or not self.is_loaded:
            return 0
        self.memory_bytes = await asyncio.to_thread(engines.memory_bytes)
        if llm.info.device.startswith("cuda"):
            info = llm.info
            cache = info.num_blocks * info.block_size * info.kv_bytes_per_token
            self.memory_bytes += len(engines.supervisors) * (info.weight_bytes + cache)
        return self.memory_bytes

    def expected_bytes(self) -> int:
        """At least how much memory loading takes: as last measured, or weights and processes."""
        processes = self.config.data_parallel_size * self.config.tensor_parallel_size
        return self.memory_bytes or weight_file_bytes(self.config) + processes * PROCESS_BYTES


class ModelManager:
    """The models by name. `start` creates a model's engine processes."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        settings: ServerSettings,
        start: StartEngines,
    ) -> None:
        self.models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self.responses = ResponseStore()
        self._settings = settings
        self._start = start
        self._lock = asyncio.Lock()  # held while unloading models or making room for one
        self._measured_at = 0.0
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._maintenance: asyncio.Task[None] | None = None
        self.is_draining = False

    # ---- for requests ----

    @contextlib.asynccontextmanager
    async def use(self, model: ServedModel) -> AsyncIterator[Starlette]:
        """The model's application: loaded first if necessary, and not unloaded while in use."""
        if model.state != "loaded" and model.num_users >= model.max_waiting:
            raise QueueFullError(
                f"{model.num_users} requests are waiting for {model.name} to load; try again later"
            )
        model.num_users += 1
        try:
            if model.state != "asleep":  # if it is, its application responds with that error
                await self.ensure_loaded(model)
            assert model.app is not None, "it is loaded"
            yield model.app
        finally:
            model.num_users -= 1
            model.used_at = time.monotonic()

    async def ensure_loaded(self, model: ServedModel) -> None:
        """Load the model if it is not loaded; raises ApiError 503 with the reason on failure."""
        if model.state == "loaded":
            return
        if model.state == "failed" and time.monotonic() - model.failed_at < RETRY_S:
            raise _failed(model)
        task = self._loads.get(model.name)
        if task is None:
            task = self._loads[model.name] = asyncio.create_task(self._load(model))
            task.add_done_callback(partial(self._loaded, model.name))
        await asyncio.shield(task)  # others may wait for it too, and later requests benefit

    def _loaded(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not task.cancelled():
            task.exception()  # mark it retrieved, in case nothing awaits the task any more

    async def _load(self, model: ServedModel) -> None:
        async with self._lock:
            await self._make_room(model)
            model.error, model.is_loading = "", True
        began = time.monotonic()
        try:
            await model.load(self._start, self._settings, self.responses)
        except ApiError as exc:
            model.error = exc.message
        except (LlmcError, OSError, MemoryError) as exc:
            model.error = str(exc) or type(exc).__name__
        except Exception as exc:
            log.exception("%s could not be loaded", model.name)
            model.error = f"{type(exc).__name__}: {exc}"
        finally:
            model.is_loading = False
        model.used_at = time.monotonic()
        if model.error:
            log.error("%s could not be loaded: %s", model.name, model.error)
            model.error = _FOLDERS.sub("", model.error)
            model.failed_at = model.used_at
            await model.close()
            raise _failed(model)
        log.info("%s loaded in %.1f s", model.name, model.used_at - began)

    async def _make_room(self, model: ServedModel) -> None:
        """Unload the least recently used models until this one fits into the budget."""
        budget = self._settings.model_memory
        if budget is None:
            return
        need, deadline = model.expected_bytes(), time.monotonic() + ROOM_S
        if need > budget:
            raise ApiError(
                503,
                f"{model.name} needs {need / 2**20:.0f} MiB, but all models together may use "
                f"{budget / 2**20:.0f} MiB (--model-memory)",
                code="model_memory_full",
            )
        while await self.memory_bytes() + need > budget:
            if not await self._unload_oldest():
                if time.monotonic() > deadline:
                    raise ApiError(
                        503,
                        f"there is not enough memory for {model.name} within --model-memory while "
                        "other models are serving requests; try again later",
                        code="model_memory_full",
                    )
                await asyncio.sleep(TICK_S)

    async def _unload_oldest(self) -> bool:
        idle = [one for one in self.models.values() if one.is_idle()]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.used_at)
        log.info("unloading %s: its memory is needed", oldest.name)
        await oldest.unload()
        return True

    async def memory_bytes(self) -> int:
        return sum([await one.measure() for one in self.models.values()])

    async def sleep(self, model: ServedModel, level: int, *, aborts: bool) -> None:
        """Put a model to sleep until `ensure_loaded`."""
        app = model.app
        if app is None:
            return
        # without the lock, which other models need to load: this may take as long as an answer
        await app.state.llm.stop_admitting(aborts=aborts)
        async with self._lock:
            if model.app is app:
                await app.state.sleeper.sleep(level, aborts=aborts)

    # ---- in the background ----

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                async with self._lock:
                    await self._maintain_once()
            except Exception:
                log.exception("the maintenance of the models failed")

    async def _maintain_once(self) -> None:
        timeout = self._settings.model_idle_timeout_s
        for model in self.models.values():
            llm = model.llm
            if llm is not None and llm.failure is not None:
                model.error, model.failed_at = llm.failure, time.monotonic()
                await model.close()
            elif timeout and model.is_idle() and time.monotonic() - model.used_at >= timeout:
                log.info("unloading %s: it was idle for %g s", model.name, timeout)
                await model.unload()
        budget, now = self._settings.model_memory, time.monotonic()
        if budget is not None and now - self._measured_at > MEASURE_S:  # caches fill with use
            self._measured_at = now
            while await self.memory_bytes() > budget and len(self.loaded) > 1:
                if not await self._unload_oldest():
                    break

    # ---- for the server: the same interface as an AsyncLLM ----

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.models.values() if model.is_loaded]

    def _llms(self) -> list[AsyncLLM]:
        return [model.llm for model in self.models.values() if model.llm is not None]

    def open(self) -> None:
        if self._maintenance is None:
            self._maintenance = asyncio.create_task(self._maintain())

    def stats(self) -> EngineStats:
        return sum_stats(llm.stats() for llm in self._llms())

    @property
    def failure(self) -> str | None:
        """Always None: a model's failure does not fail the server."""
        return None

    @property
    def num_active(self) -> int:
        return sum(llm.num_active for llm in self._llms())

    async def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the running ones; returns whether all ended in time."""
        self.is_draining = True
        deadline = time.monotonic() + timeout
        while any(one.num_users for one in self.models.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        ended = await asyncio.gather(*(llm.drain(0) for llm in self._llms()))
        return all(ended)

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        await self.drain(drain_timeout)
        if self._maintenance is not None:
            self._maintenance.cancel()
        await asyncio.gather(*(model.close() for model in self.models.values()))


def _failed(model: ServedModel) -> ApiError:
    return ApiError(503, f"{model.name} could not be loaded: {model.error}", code="model_failed")


def weight_file_bytes(config: EngineConfig) -> int:
    """Total size of the weight files; 0 for a model that is not downloaded yet."""
    try:
        location = locate(config)
    except (LlmcError, OSError):
        return 0
    if location is None:
        return 0
    if location.is_gguf:
        return sum(part.stat().st_size for part in all_parts(location.path))
    return sum(file.stat().st_size for file in location.path.glob("*.safetensors"))
