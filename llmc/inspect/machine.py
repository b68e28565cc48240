"""The memory and bandwidth of the machine that a model should run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmc.host_memory import host_memory
from llmc.load_test.machine import measure_read_bandwidth

_MEASURED_BYTES = 256 << 20  # more than caches hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes, and bytes per second. None: not given, and not known for this machine."""

    memory_bytes: int | None
    bandwidth: float | None
    memory_is_given: bool
    bandwidth_is_given: bool


def find_machine(device: str, memory_bytes: int | None, bandwidth: float | None) -> Machine:
    """The given values; missing ones are those of this machine, if it has such a device."""
    here = device != "cuda" or torch.cuda.is_available()
    found_memory, found_bandwidth = memory_bytes, bandwidth
    if here and found_memory is None:
        if device == "cuda":
            found_memory = int(torch.cuda.get_device_properties(0).total_memory)
        else:
            found_memory = host_memory().total
    if here and found_bandwidth is None:
        found_bandwidth = measure_read_bandwidth(device, repeats=3, max_bytes=_MEASURED_BYTES)
    return Machine(
        memory_bytes=found_memory,
        bandwidth=found_bandwidth,
        memory_is_given=memory_bytes is not None,
        bandwidth_is_given=bandwidth is not None,
    )
