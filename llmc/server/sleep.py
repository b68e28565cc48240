"""/sleep, /wake_up, /is_sleeping: release an idle server's memory, and allocate it again.

Level 1 keeps the weights: an engine on a CPU frees the memory of its caches and keeps running.
Level 2 stops the engine process, and waking restarts it. Level 1 also does so if caches can't be
freed in place (GPUs, several ranks).
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM
from llmc.errors import LlmcError
from llmc.processes.engine_processes import EngineProcesses
from llmc.server.errors import ApiError, json_response

LEVELS = ("1", "2")
MODES = ("abort", "wait")


class Sleeper:
    """Puts one model to sleep and wakes it. `engines` None: its engine is in this process."""

    def __init__(self, llm: AsyncLLM, engines: EngineProcesses | None) -> None:
        self._llm = llm
        self._engines = engines
        self._lock = asyncio.Lock()
        self.level = 0  # 0: awake
        self.is_unloaded = False  # unlike a sleeping one, the next request wakes it

    async def sleep(self, level: int, *, aborts: bool) -> None:
        """Go to sleep: abort running requests or wait for them, and reject new ones."""
        async with self._lock:
            ends = level == 2 or not _keeps_process(self._llm)
            if ends and self._engines is None:
                raise ApiError(
                    400, "the engine runs in the server's own process, which can't be stopped"
                )
            await self._llm.stop_admitting(aborts=aborts)
            self.is_unloaded = False
            if self.level < level:
                try:
                    await self._sleep(ends)
                    self.level = level
                finally:
                    self._llm.is_asleep = self.level > 0

    async def unload(self) -> None:
        """Level 2 for a model without requests; the next request wakes it."""
        self.level, self.is_unloaded, self._llm.is_asleep = 2, True, True
        async with self._lock:
            await self._llm.stop_admitting(aborts=False)
            await self._sleep(ends=True)

    async def _sleep(self, ends: bool) -> None:
        if ends and self._engines is not None:
            await asyncio.to_thread(self._engines.suspend)
        elif self._llm.is_alive:
            await self._llm.run_operation("release_caches")

    async def wake_up(self) -> None:
        """Return once requests are accepted again. If the engine fails to start, raises ApiError
        503 with the reason, and the model stays asleep."""
        async with self._lock:
            if self._engines is not None and not self._llm.is_alive:
                try:
                    await asyncio.to_thread(self._engines.resume)
                except (LlmcError, OSError, MemoryError) as exc:
                    raise ApiError(503, f"can't be woken: {exc}", code="wake_up_failed") from exc
            self.level, self.is_unloaded, self._llm.is_asleep = 0, False, False


def _keeps_process(llm: AsyncLLM) -> bool:
    return llm.info.device == "cpu" and llm.config.tensor_parallel_size == 1


def wanted(request: Request) -> tuple[int, bool]:
    """The requested sleep level, and whether to abort running requests."""
    level = request.query_params.get("level", "1")
    mode = request.query_params.get("mode", "abort")
    if level not in LEVELS:
        raise ApiError(400, f"level must be 1 or 2, got {level!r:.80}", param="level")
    if mode not in MODES:
        raise ApiError(400, f"mode must be abort or wait, got {mode!r:.80}", param="mode")
    return int(level), mode == "abort"


async def go_to_sleep(request: Request) -> Response:
    """Release memory. Running requests are aborted; with mode=wait they finish first."""
    level, aborts = wanted(request)
    await _sleeper(request).sleep(level, aborts=aborts)
    return json_response({"is_sleeping": True})


async def wake_up(request: Request) -> Response:
    """Allocate memory again. Responds once requests are accepted."""
    await _sleeper(request).wake_up()
    return json_response({"is_sleeping": False})


async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": _sleeper(request).level > 0})


def _sleeper(request: Request) -> Sleeper:
    if request.app.state.settings.api_workers > 1:
        raise ApiError(
            400, "with several API processes (--api-workers) one can't put the others to sleep"
        )
    sleeper: Sleeper = request.app.state.sleeper
    return sleeper
