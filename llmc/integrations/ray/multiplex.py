"""LoRA adapters by the model ids of Serve's multiplexing.

    header serve_multiplexed_model_id: poems -> a replica that has it, if there is one
                                             -> lora_dir/poems, loaded if it is not yet
    body {"model": "poems", ...}             -> answered with it

Serve evicts the least recently used id, and the engine does the same with the adapter itself
(llmc/engine/adapters.py). The name stays registered, because requests in flight must find it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.server.adapters import Adapters
from llmc.server.errors import ApiError

Load = Callable[[str], Awaitable[object]]


def add_multiplexing(
    app: Starlette, lora_dir: str, wanted: Callable[[], str], cached: Callable[[Load], Load]
) -> None:
    """Load adapters on request; inside the Guard, so that only admitted callers can load any.

    `wanted` returns the id of the current request, "" for none. `cached` is Serve's decorator,
    which reports to the proxies which adapters a replica has.
    """
    folder = Path(lora_dir).resolve()
    adapters: Adapters = app.state.adapters

    async def load_adapter(name: str) -> str:
        if name not in adapters.by_name:
            await adapters.load(name, str(folder / name), replaces=False)
        return name

    app.user_middleware.append(
        Middleware(_LoadWanted, folder=folder, wanted=wanted, load=cached(load_adapter))
    )


class _LoadWanted:
    """Middleware that loads a request's adapter before the request is routed."""

    def __init__(
        self, app: ASGIApp, *, folder: Path, wanted: Callable[[], str], load: Load
    ) -> None:
        self._app = app
        self._folder = folder
        self._wanted = wanted
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._wanted() if scope["type"] == "http" else ""
        if name:
            self._check(name)  # first, because Serve evicts another id to make room for a new one
            await self._load(name)
        await self._app(scope, receive, send)

    def _check(self, name: str) -> None:
        try:
            path = (self._folder / name).resolve()
            is_there = path.is_relative_to(self._folder) and path != self._folder
            is_there = is_there and (path / "adapter_config.json").is_file()
        except (OSError, ValueError, RuntimeError):
            is_there = False
        if not is_there:
            raise ApiError(
                404, f"there is no LoRA adapter {name!r:.80} to load", code="model_not_found"
            )
