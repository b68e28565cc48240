"""Facts about the machine that a benchmark result needs: versions, memory, read bandwidth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from llmc import __version__
from llmc.errors import ConfigError
from llmc.host_memory import host_memory
from llmc.kernels.cpu.compile import find_toolchain
from llmc.kernels.cpu.levels import pick_level, supported
from llmc.kernels.cpu.pages import advise_huge_pages

GIB = 2**30
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def package_versions() -> dict[str, str]:
    found = {"llmc": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpu_target": _cpu_target(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": host_memory().total,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return facts


def _cpu_target() -> str:
    """The instruction-set level that the CPU kernels use, and those that the processor has."""
    try:
        level = pick_level()
    except ConfigError as error:
        return str(error)
    names = ", ".join(level.name for level in supported())
    return f"{level.name} (of {names})" if level else "none: ops use their references"


def cxx_compiler() -> str | None:
    """The compiler that would build the C++ ops, and its version; None if there is none."""
    toolchain = find_toolchain()
    return None if toolchain is None else f"{toolchain.command} ({toolchain.version})"


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int | None:
    """The peak memory of this process, or None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def peak_cuda_bytes() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def measure_read_bandwidth(device: str, *, repeats: int = 5, max_bytes: int = GIB) -> float:
    """Bytes per second of the best of several sums over a buffer larger than any cache.

    A sum reads every byte once and writes nothing, as decoding does with weights. The buffer is
    smaller than `max_bytes` only if free memory is short.
    """
    is_cuda = device.startswith("cuda")
    free = torch.cuda.mem_get_info()[0] if is_cuda else host_memory().available
    num_floats = max(1, min(max_bytes, free // 4) // 4)
    buffer = torch.empty(num_floats, dtype=torch.float32, device="cuda" if is_cuda else "cpu")
    advise_huge_pages(buffer).fill_(1)  # as for weights: small pages would understate the limit

    def read_once() -> None:
        total = buffer.sum()
        if is_cuda:
            torch.cuda.synchronize()
        assert total.numel() == 1

    read_once()  # the first touch of pages and kernels does not count
    best = min(_seconds(read_once) for _ in range(repeats))
    return num_floats * 4 / best


def measure_product_rate(device: str, dtype: str, *, repeats: int = 5) -> float:
    """Operations per second of torch's product of square matrices, the best of several.

    In `dtype`, or in float32 if that is faster, as on processors without instructions for `dtype`.
    """
    is_cuda = device.startswith("cuda")
    size = 8192 if is_cuda else 1024

    def rate(kind: torch.dtype) -> float:
        place = "cuda" if is_cuda else "cpu"
        left, right = (torch.randn(size, size, dtype=kind, device=place) for _ in range(2))

        def multiply() -> None:
            torch.mm(left, right)
            if is_cuda:
                torch.cuda.synchronize()

        multiply()
        return 2 * size**3 / min(_seconds(multiply) for _ in range(repeats))

    return max(rate(kind) for kind in {torch.float32, getattr(torch, dtype)})


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
