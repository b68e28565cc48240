"""An AdapterLoader without real adapters: they are loaded when the test says so."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.lora_request import LoRARequest


class Loader:
    """Rejects adapters named `refused`."""

    def __init__(self, num_slots: int, *, at_once: bool = True) -> None:
        self.num_slots = num_slots
        self.at_once = at_once
        self.asked_for: list[str] = []  # names
        self.begun: list[tuple[LoRARequest, LoRARequest | None]] = []
        self.loading: dict[LoRARequest, Future[Any]] = {}

    def check(self, adapter: LoRARequest) -> None:
        self.asked_for.append(adapter.lora_name)
        if adapter.lora_name == "refused":
            raise InvalidRequestError("no such adapter", param="lora_request")

    def begin(self, adapter: LoRARequest, instead_of: LoRARequest | None) -> Future[Any]:
        self.begun.append((adapter, instead_of))
        future = self.loading[adapter] = Future()
        if self.at_once:
            future.set_result(None)
        return future
