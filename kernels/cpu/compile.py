"""Runs the C++ compiler: which one, with which flags, and the key that names the result.

The kernels are compiled once for each instruction set level. The rest (the bindings, the list of
levels and the thread pool) runs on any processor. Torch is not needed to build (torch_abi.h). The
library only names libtorch_cpu as a dependency, so it works with any torch from 2.11 on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.control_groups import available_cores
from llmc.kernels.cpu.levels import Level

SOURCES = Path(__file__).parent
OnFile = Callable[[int, int], None]  # (files compiled so far, total files)
_TORCH = "libtorch_cpu.so"
_COMPILERS = ("g++", "clang++", "c++")
_GLUE = ("levels.cpp", "recording.cpp", "team.cpp", "tensor.cpp")  # in addition to the bindings
_FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-w")
# Included by nearly every source: parsed once per library instead of once per file.
_KERNEL_HEADERS = ("vec.h", "dtypes.h", "parallel.h", "kernels.h", "<numeric>")
_GLUE_HEADERS = ("bindings.h",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A compiler and its version line."""

    compiler: tuple[str, ...]
    version: str

    @property
    def command(self) -> str:
        """The compiler as a shell command, such as `ccache g++`."""
        return shlex.join(self.compiler)

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()

    def key(self, levels: Sequence[Level]) -> str:
        """A key that identifies a library by its compiler, flags, levels and sources."""
        hasher = hashlib.sha256()
        flags = [flag for level in levels for flag in (level.name, *level.flags)]
        for part in (*self.compiler, self.version, *_FLAGS, *flags):
            hasher.update(part.encode() + b"\0")
        hasher.update(sources_digest().encode())
        return hasher.hexdigest()[:32]


def kernel_sources() -> list[Path]:
    """The sources that are compiled once per level."""
    return [path for path in sources() if not _runs_anywhere(path)]


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def sources_digest() -> str:
    hasher = hashlib.sha256()
    for path in (*sources(), *sorted(SOURCES.glob("*.h"))):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def write_manifest(library: Path, levels: Sequence[Level]) -> None:
    """Write a manifest next to the library: its digest, levels and source digest."""
    manifest = {
        "library": digest(library),
        "sources": sources_digest(),
        "levels": [level.name for level in levels],
    }
    library.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _runs_anywhere(source: Path) -> bool:
    return source.name.endswith("bindings.cpp") or source.name in _GLUE


def find_toolchain() -> Toolchain | None:
    """$CXX if it is set (and only that), otherwise the first compiler on the path."""
    given = os.environ.get("CXX")
    for candidate in (given,) if given else _COMPILERS:
        command = shlex.split(candidate)
        if not command or shutil.which(command[0]) is None:
            continue
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return Toolchain(compiler=tuple(command), version=asked.stdout.splitlines()[0])
    return None


def object_command(
    toolchain: Toolchain,
    source: Path,
    target: Path,
    levels: Sequence[Level],
    *,
    headers: Path | None = None,
) -> list[str]:
    """The command for one source: a kernel for the one given level, others for any processor.

    `headers`: the folder given to `compile_headers`.
    """
    is_kernel = source in kernel_sources()
    flags = _flags(toolchain, levels, is_kernel=is_kernel)
    if headers is not None:
        flags += ["-include", str(_headers_file(headers, levels, is_kernel=is_kernel))]
    return [*toolchain.compiler, *flags, "-c", str(source), "-o", str(target)]


def _flags(toolchain: Toolchain, levels: Sequence[Level], *, is_kernel: bool) -> list[str]:
    if is_kernel:
        (level,) = levels
        # -O3 takes a seventh longer and is no faster: loops are vectorized by hand
        flags = ["-O2", *level.flags, f"-DLLMC_TABLE={level.symbol}"]
        flags.append(f'-DLLMC_LEVEL="{level.name}"')
    else:  # glue: optimizing it further would only take time
        tables = " ".join(f"K({level.symbol})" for level in levels)
        flags = ["-O1", f"-DLLMC_TABLES(K)={tables}", f"-I{SOURCES}"]
    if not toolchain.is_clang:
        flags.append(
            "-fno-gnu-unique"
        )  # GNU unique symbols could not be made local to a level (_seal_commands)
    return [*_FLAGS, *flags]


def _headers_file(folder: Path, levels: Sequence[Level], *, is_kernel: bool) -> Path:
    return folder / f"{levels[0].name if is_kernel else 'any'}.h"


def compile_headers(toolchain: Toolchain, folder: Path, levels: Sequence[Level]) -> str | None:
    """Precompile shared headers into `folder`, for each level and for the glue. Returns the first
    error, or None. A compiler that can't use the result parses the plain headers."""
    commands = []
    for kernel_levels in (*([level] for level in levels), None):
        is_kernel = kernel_levels is not None
        at = kernel_levels or levels
        file = _headers_file(folder, at, is_kernel=is_kernel)
        names = _KERNEL_HEADERS if is_kernel else _GLUE_HEADERS
        quoted = [name if name.startswith("<") else f'"{SOURCES / name}"' for name in names]
        file.write_text("".join(f"#include {name}\n" for name in quoted))
        made = ["-x", "c++-header", str(file), "-o", f"{file}.gch"]
        commands.append([*toolchain.compiler, *_flags(toolchain, at, is_kernel=is_kernel), *made])
    return run_all(commands, folder, None)


def _stub_command(toolchain: Toolchain, stub: Path) -> list[str]:
    """The command that makes an empty library with the name of torch's, for the linker."""
    shared = [*toolchain.compiler, "-shared", "-nostdlib", f"-Wl,-soname,{_TORCH}"]
    return [*shared, "-x", "c", os.devnull, "-o", str(stub)]


def _link_command(
    toolchain: Toolchain, objects: Sequence[Path], stub: Path, target: Path
) -> list[str]:
    return [
        *toolchain.compiler,
        "-shared",
        *map(str, objects),
        "-Wl,--no-as-needed",
        str(stub),
        "-o",
        str(target),
        "-pthread",
    ]


def _seal_commands(
    toolchain: Toolchain, objects: Sequence[Path], target: Path, level: Level
) -> list[list[str]]:
    """Combine a level's objects into one in which only its table is visible.

    Otherwise the linker would keep one copy of code that several levels instantiate (such as
    std::vector's growth), possibly from a level that this processor does not support.
    """
    asked = [*toolchain.compiler, "-print-prog-name=objcopy"]
    objcopy = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    groups = "-Wl,--force-group-allocation"  # so sections are not merged by name across levels
    return [
        [*toolchain.compiler, "-r", "-nostdlib", groups, *map(str, objects), "-o", str(target)],
        [objcopy, f"--keep-global-symbol={level.symbol}", str(target)],
    ]


def first_error(output: str) -> str:
    """The first line of a compiler's or linker's output that reports an error; "" if empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("collect2:")] or lines
    for line in lines:
        if "error" in line.lower():
            return line
    return lines[0] if lines else ""


def _nothing_said(code: int, folder: Path) -> str:
    """Why a command may have failed whose output is empty: a full disk holds no output either."""
    free = shutil.disk_usage(folder).free / 2**20
    return f"exit code {code}, without a message; {folder.parent} has {free:,.0f} MiB free"


def run_all(
    commands: Sequence[list[str]],
    folder: Path,
    on_file: OnFile | None,
    on_success: Callable[[list[str]], None] | None = None,
) -> str | None:
    """Run commands in parallel, one per core of this process. Returns the first error, or None."""
    limit = available_cores()
    waiting = list(reversed(commands))
    running = dict[subprocess.Popen[bytes], tuple[Path, list[str]]]()
    error: str | None = None
    try:
        while running or (waiting and error is None):
            while waiting and error is None and len(running) < limit:
                output = folder / f"{len(waiting)}.log"
                with output.open("wb") as file:
                    command = waiting.pop()
                    process = subprocess.Popen(
                        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                    )
                running[process] = output, command
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                output, command = running.pop(process)
                if process.returncode == 0 and on_success is not None:
                    on_success(command)
                if process.returncode != 0 and error is None:
                    error = first_error(output.read_text(errors="replace"))
                    error = error or _nothing_said(process.returncode, folder)
                output.unlink()
                if on_file is not None:
                    on_file(len(commands) - len(waiting) - len(running), len(commands))
            if not ended:
                time.sleep(0.02)
    finally:  # leave no processes behind if an exception is raised here
        for process in running:
            process.kill()
            process.wait()
    return error


def compile_library(
    toolchain: Toolchain,
    levels: Sequence[Level],
    library: Path,
    on_file: OnFile | None = None,
    *,
    objects_folder: Path | None = None,
) -> str | None:
    """Build `library` with these levels. Returns the compiler's first error line, or None.

    Objects in `objects_folder` are reused. New ones are moved there when they are complete, so that
    an interrupted build continues where it stopped.
    """
    folder = library.parent
    kept = objects_folder or folder
    headers = Path(tempfile.mkdtemp(prefix="headers-", dir=folder))
    objects: list[Path] = []
    compiles: list[tuple[int, list[str]]] = []
    finish: list[list[str]] = []

    def compile_to(source: Path, name: str, at: Sequence[Level]) -> None:
        command = object_command(toolchain, source, folder / name, at, headers=headers)
        compiles.append((source.stat().st_size, command))

    for level in levels:
        made = [kept / f"{level.name}-{source.stem}.o" for source in kernel_sources()]
        for source, at in zip(kernel_sources(), made, strict=True):
            if not at.exists():
                compile_to(source, at.name, [level])
        if len(levels) > 1:
            sealed = folder / f"{level.name}.o"
            finish += _seal_commands(toolchain, made, sealed, level)
            made = [sealed]
        objects += made
    for source in filter(_runs_anywhere, sources()):
        objects.append(kept / f"{source.stem}.o")
        if not objects[-1].exists():
            compile_to(source, objects[-1].name, levels)
    # start the slowest ones first, to balance the load
    compiles.sort(key=lambda sized: -sized[0])

    def keep(command: list[str]) -> None:
        made = Path(command[-1])
        made.replace(kept / made.name)

    error = compile_headers(toolchain, headers, levels) if compiles else None
    error = error or run_all([command for _, command in compiles], folder, on_file, keep)
    shutil.rmtree(headers)
    stub = folder / _TORCH
    finish += [_stub_command(toolchain, stub), _link_command(toolchain, objects, stub, library)]
    for command in finish:
        error = error or run_all([command], folder, None)
    for path in (*folder.glob("*.o"), *folder.glob(_TORCH)):
        path.unlink()
    if error is None:
        write_manifest(library, levels)
    return error
