"""Checks what llmc can use on this machine, and what is missing: the facts behind `llmc doctor`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from llmc import __version__
from llmc.cache_dir import cache_dir
from llmc.control_groups import quota_cores
from llmc.errors import ConfigError, reason_of
from llmc.host_memory import host_memory
from llmc.kernels.cpu.build import BuildError, find_library
from llmc.kernels.cpu.compile import find_toolchain
from llmc.kernels.cpu.levels import pick_level, supported
from llmc.load_test.machine import GIB, processor_name
from llmc.load_test.required_packages import Finding

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEAST_MEMORY = 2 * GIB  # for the default model, compiled
LEAST_DISK = 2 * GIB  # for compiled code and a download


def examine() -> Iterator[Finding]:
    """The findings about the machine. Packages are those of required_packages.py."""
    yield (processor := _processor())
    if processor.is_ok:  # else there are no kernels for it
        yield _kernels()
    yield _threads()
    yield _memory()
    yield from _huge_pages(HUGE_PAGES)
    yield _gpu()
    yield _folder()
    yield Finding(name="Python", value=sys.version.split()[0])
    yield Finding(name="llmc", value=__version__)


def _processor() -> Finding:
    try:
        level = pick_level()
    except ConfigError as error:
        return Finding(name="instructions", value="none", advice=str(error), is_needed=True)
    if level is None:
        return Finding(
            name="instructions",
            value=f"{processor_name()}: no instruction set that llmc has kernels for",
            advice="ops use their slow reference versions; use a CPU with AVX2 or NEON",
        )
    names = ", ".join(one.name for one in supported())
    return Finding(name="instructions", value=f"{level.name} (of {names}), {processor_name()}")


def _kernels() -> Finding:
    name = "C++ ops"
    toolchain = find_toolchain()
    try:
        library = find_library()
    except (BuildError, OSError) as error:
        return Finding(name=name, value="can't be read or built", advice=reason_of(error))
    if library is not None:
        return Finding(name=name, value=str(library))
    if toolchain is not None:
        return Finding(name=name, value=f"built at the first start, by {toolchain.command}")
    return Finding(
        name=name,
        value="no compiler, and this package includes no built ops",
        advice="install a C++ compiler (Debian: apt install g++), or a wheel of llmc",
    )


def _threads() -> Finding:
    count, quota = torch.get_num_threads(), quota_cores()
    value = f"{count} of {os.cpu_count()} logical CPUs"
    if quota is not None:
        value += f"; the container's quota is {quota:g}"
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None and quota is not None and given.isdigit() and int(given) > quota:
        advice = f"OMP_NUM_THREADS={given} exceeds the quota, so threads wait: unset it"
        return Finding(name="threads", value=value, advice=advice)
    return Finding(name="threads", value=value)


def _memory() -> Finding:
    memory = host_memory()
    value = f"{memory.available / GIB:.1f} GiB available of {memory.total / GIB:.1f}"
    advice = ""
    if memory.available < LEAST_MEMORY:
        advice = f"even small models need {LEAST_MEMORY / GIB:g} GiB: close other programs"
    return Finding(name="memory", value=value, advice=advice)


def _huge_pages(file: Path) -> Iterator[Finding]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:  # not Linux
        return
    chosen = re.search(r"\[(\w+)\]", text)
    value = chosen.group(1) if chosen else text.strip()
    advice = ""
    if value == "never":
        advice = f"they make reading weights faster: echo madvise | sudo tee {file}"
    yield Finding(name="huge pages", value=value, advice=advice)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        more = f", and {count - 1} more" if count > 1 else ""
        size = f"{properties.total_memory / GIB:.0f} GiB"
        return Finding(name="GPU", value=f"{properties.name}, {size}{more}")
    if shutil.which("nvidia-smi"):
        return Finding(
            name="GPU",
            value=f"not detected by torch {torch.__version__}",
            advice="install torch with CUDA (pytorch.org) and a recent driver",
        )
    return Finding(name="GPU", value="none; models run on the CPU")


def _folder() -> Finding:
    folder = cache_dir()
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:  # permissions would not tell of a file, or of a read-only disk
        advice = (
            f"it is not writable ({error.strerror}), so every start compiles again, and GGUF files "
            "such as the default model can't be served: set LLMC_CACHE_DIR"
        )
        return Finding(name="cache folder", value=str(folder), advice=advice)
    value = f"{folder}, {free / GIB:.1f} GiB free"
    advice = f"free up {LEAST_DISK / GIB:g} GiB, or set LLMC_CACHE_DIR" if free < LEAST_DISK else ""
    return Finding(name="cache folder", value=value, advice=advice)
