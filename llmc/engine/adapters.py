"""AdapterSlots: maps LoRA adapters to slots in device memory.

    request waits --prepare--> read into host memory, in another thread --acquire--> it has a row
    StepPlan.adapter_copies: host memory -> slot, before the first step that uses it

A slot is assigned to an adapter as soon as loading starts. It can be reassigned while no request
with a row uses it, because then no step in flight reads it either. The least recently used adapter
is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from llmc.engine.plan import AdapterCopy
from llmc.lora_request import LoRARequest

IDLE_WAIT_S = 0.05  # how long to wait for an adapter when there is nothing else to do


class AdapterLoader(Protocol):
    """Reads adapters into host memory; provided by the runner."""

    @property
    def num_slots(self) -> int: ...

    def check(self, adapter: LoRARequest, /) -> None:
        """Raise InvalidRequestError if it does not fit the model. Reads no weights."""

    def begin(self, adapter: LoRARequest, instead_of: LoRARequest | None, /) -> Future[Any]:
        """Load the adapter into host memory and keep it there until its slot is reassigned.

        `instead_of` is the adapter evicted from the slot. The future may fail with
        InvalidRequestError."""


class Readiness(Enum):
    READY = "it has a slot, and its weights are in host memory or already in the slot"
    LOADING = "it is being loaded"
    NO_SLOT = "every slot is in use"


@dataclass(slots=True)
class _Slot:
    number: int
    loading: Future[Any] | None
    num_users: int = 0  # requests that have a row
    must_copy: bool = False

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()


class AdapterSlots:
    """The slots, the adapters in them, and which of these must be copied by the next plan."""

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._free = list(range(loader.num_slots, 0, -1))
        self._slots: OrderedDict[LoRARequest, _Slot] = OrderedDict()  # least recently used first
        self._failed: dict[LoRARequest, str] = {}

    def prepare(self, adapter: LoRARequest) -> Readiness:
        """Whether a request with this adapter can be given a row now; if not, start loading it."""
        if adapter in self._failed:  # its requests are about to be ended
            return Readiness.LOADING
        slot = self._slots.get(adapter) or self._assign(adapter)
        if slot is None:
            return Readiness.NO_SLOT
        if slot.loading is None:
            return Readiness.READY
        if not slot.loading.done():
            return Readiness.LOADING
        error = slot.loading.exception()
        if error is not None:
            self._failed[adapter] = str(error)
            self._free.append(self._slots.pop(adapter).number)
            return Readiness.LOADING
        slot.loading, slot.must_copy = None, True
        return Readiness.READY

    def _assign(self, adapter: LoRARequest) -> _Slot | None:
        """Assign a free slot, or that of the least recently used adapter that no request uses."""
        old: LoRARequest | None = None
        if not self._free:
            idle = (k for k, s in self._slots.items() if not s.num_users and not s.is_loading)
            old = next(idle, None)
            if old is None:
                return None
            self._free.append(self._slots.pop(old).number)
        loading: Future[Any]
        try:
            loading = self._loader.begin(adapter, old)
        except Exception as error:  # such as "can't start new thread": ends its requests only
            loading = Future()
            loading.set_exception(error)
        slot = self._slots[adapter] = _Slot(self._free.pop(), loading)
        return slot

    def acquire(self, adapter: LoRARequest) -> int:
        """Count a request that was given a row as a user of its (ready) adapter. -> its slot."""
        slot = self._slots[adapter]
        slot.num_users += 1
        self._slots.move_to_end(adapter)
        return slot.number

    def release(self, adapter: LoRARequest) -> None:
        """Count off a user: a request with this adapter released its row."""
        self._slots[adapter].num_users -= 1

    def pop_copies(self) -> list[AdapterCopy]:
        """The adapter copies that the next plan must carry."""
        copies = []
        for adapter, slot in self._slots.items():
            if slot.must_copy and slot.num_users:
                slot.must_copy = False
                copies.append(AdapterCopy(slot=slot.number, adapter=adapter))
        return copies

    def copy_again(self, copies: Sequence[AdapterCopy]) -> None:
        """The step with these copies failed, so the next step must make them."""
        for copy in copies:
            slot = self._slots.get(copy.adapter)
            if slot is not None and slot.number == copy.slot:
                slot.must_copy = slot.loading is None

    def pop_failed(self) -> dict[LoRARequest, str]:
        """Adapters that could not be loaded, with the reasons."""
        failed, self._failed = self._failed, {}
        return failed

    def wait_for_any(self) -> bool:
        """Wait briefly for an adapter that is loading. Returns False if none is."""
        loading = [slot.loading for slot in self._slots.values() if slot.loading is not None]
        if loading:
            wait(loading, IDLE_WAIT_S, FIRST_COMPLETED)
        return bool(loading)

    def check(self, in_use: Sequence[LoRARequest | None]) -> None:
        """Raise AssertionError unless slots and their user counts match the requests with rows."""
        numbers = sorted([*self._free, *(slot.number for slot in self._slots.values())])
        total = self._loader.num_slots
        if numbers != list(range(1, total + 1)):
            raise AssertionError(f"free and assigned slots are {numbers}, expected 1 to {total}")
        for adapter, slot in self._slots.items():
            if slot.num_users != sum(one == adapter for one in in_use):
                raise AssertionError(f"adapter {adapter.lora_name!r} miscounts its requests")
