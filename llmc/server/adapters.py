"""LoRA adapters over HTTP: each is served as a model of its own, with the base model as parent.

The adapters of --lora-modules are available from the start. With --runtime-lora-dir,
/v1/load_lora_adapter and /v1/unload_lora_adapter change the list, but only for directories inside
that one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError, InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.sampling_params import SamplingParams
from llmc.server.body import read_body
from llmc.server.errors import ApiError
from llmc.server.protocol import LoadAdapterBody, UnloadAdapterBody
from llmc.server.settings import ServerSettings
from llmc.startup.adapter_files import as_peft

MAX_ADAPTERS = 4096  # names served at a time
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


class Adapters:
    """The served adapters, by name. An adapter's number is never reused."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, names: tuple[str, ...]) -> None:
        self._llm = llm
        self._names = names
        self._num_made = 0
        self.by_name: dict[str, LoRARequest] = {}
        self.given_paths: dict[str, str] = {}  # before a download or conversion, by name
        if (settings.lora_modules or settings.runtime_lora_dir) and not llm.config.enable_lora:
            raise ConfigError("adapters need --enable-lora")
        for name, path in settings.lora_modules.items():
            try:
                self.add(as_peft(self.make(name, path), llm.info.path), path)
            except InvalidRequestError as error:
                raise ConfigError(f"--lora-modules {name}={path}: {error}") from error

    def make(self, name: str, path: str, *, replaces: bool = False) -> LoRARequest:
        """An adapter with a new number; raises InvalidRequestError if the name is taken."""
        if name in self._names or (name in self.by_name and not replaces):
            raise InvalidRequestError(
                f"a model is already served as {name!r:.80}; unload it first, or choose another "
                "name",
                param="lora_name",
            )
        if len(self.by_name) >= MAX_ADAPTERS:
            raise InvalidRequestError(
                f"the limit is {MAX_ADAPTERS} adapters; unload one first", param="lora_name"
            )
        self._num_made += 1
        return LoRARequest(name, self._num_made, path)

    def add(self, adapter: LoRARequest, given_path: str) -> None:
        self.by_name[adapter.lora_name] = adapter
        self.given_paths[adapter.lora_name] = given_path

    def remove(self, name: str) -> bool:
        """Whether there was one."""
        self.given_paths.pop(name, None)
        return self.by_name.pop(name, None) is not None

    async def check(self) -> None:
        """Generate a token with each adapter. ConfigError for one that can't be used."""
        for name, adapter in self.by_name.items():
            try:
                await _try(self._llm, adapter)
            except InvalidRequestError as error:
                where = f"--lora-modules {name}={self.given_paths[name]}"
                raise ConfigError(f"{where}: {error}") from error

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Load an adapter. InvalidRequestError if it can't be loaded or can't run.

        `replaces`: the one of this name, whose requests that have begun finish with it."""
        adapter = self.make(name, path, replaces=replaces)
        adapter = await asyncio.to_thread(as_peft, adapter, self._llm.info.path)
        await _try(self._llm, adapter)
        if name in self.by_name and not replaces:  # by another call meanwhile
            self.make(name, path)
        self.add(adapter, path)


def adapter_named(request: Request, model: str) -> LoRARequest | None:
    """The adapter served under a name; None for the base model's names."""
    adapters: Adapters = request.app.state.adapters
    return adapters.by_name.get(model)


async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter. It is loaded and generates one token before the response is sent."""
    folder = _runtime_dir(request)
    body = await read_body(request, LoadAdapterBody)
    adapters: Adapters = request.app.state.adapters
    path = _inside(folder, body.lora_path)
    await adapters.load(body.lora_name, path, replaces=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. Running requests that use it still finish."""
    _runtime_dir(request)
    body = await read_body(request, UnloadAdapterBody)
    adapters: Adapters = request.app.state.adapters
    if not adapters.remove(body.lora_name):
        raise ApiError(
            404,
            f"no LoRA adapter is served as {body.lora_name!r:.80}",
            param="lora_name",
            code="model_not_found",
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _runtime_dir(request: Request) -> Path:
    settings: ServerSettings = request.app.state.settings
    if settings.runtime_lora_dir is None:
        raise ApiError(
            404,
            "adapters can't be loaded or unloaded here: the server was started without "
            "--runtime-lora-dir",
        )
    return Path(settings.runtime_lora_dir).resolve()


def _inside(folder: Path, path: str) -> str:
    """Resolve a caller's path, relative to `folder` or absolute; symbolic links are followed."""
    try:
        found = (folder / path).resolve()
        is_inside = found.is_relative_to(folder) and found != folder and found.exists()
    except (OSError, ValueError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise InvalidRequestError(
            f"lora_path {path!r:.200} is not inside the server's --runtime-lora-dir",
            param="lora_path",
        )
    return str(found)


async def _try(llm: AsyncLLM, adapter: LoRARequest) -> None:
    """Generate one token with the adapter; InvalidRequestError if it can't be loaded."""
    source = (await llm.prepare.prompt([0], _ONE_TOKEN)).with_adapter(adapter)
    async with llm.submit(source) as stream:
        while await stream.deltas():
            pass
        error = stream.requests[0].error
    if error is not None:
        raise InvalidRequestError(error, param="lora_path")
