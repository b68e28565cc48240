"""Runs the C++ compiler: which one, with which flags, and the key that names the result.

The kernels know no torch headers and compile in seconds; only the *bindings.cpp do. Linked to the
OpenMP runtime that torch brings, since two in one process fight over the cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-fPIC", "-fopenmp", "-march=native", "-w")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A compiler and what it says of itself."""

    compiler: tuple[str, ...]
    version: str

    def key(self) -> str:
        """Names a library by all it is made from and for."""
        hasher = hashlib.sha256()
        for part in (*self.compiler, self.version, *_FLAGS, torch.__version__, cpu_model()):
            hasher.update(part.encode() + b"\0")
        for path in (*sources(), *sorted(SOURCES.glob("*.h"))):
            hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return hasher.hexdigest()[:32]


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def cpu_model() -> str:
    """What -march=native depends on: the processor's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    seen = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(seen[name] for name in wanted if name in seen)


def find_toolchain() -> Toolchain | None:
    """$CXX if it is set (and then nothing else), or the first compiler on the path."""
    given = os.environ.get("CXX")
    for candidate in (given,) if given else _COMPILERS:
        command = shlex.split(candidate)
        if not command or shutil.which(command[0]) is None:
            continue
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return Toolchain(compiler=tuple(command), version=asked.stdout.splitlines()[0])
    return None


def _torch_openmp() -> list[str]:
    """The OpenMP runtime that torch loads; the compiler's own where torch brings none."""
    for folder in (_TORCH / "lib", _TORCH.parent / "torch.libs"):
        for pattern in ("libgomp*.so*", "libiomp5.so"):
            for library in sorted(folder.glob(pattern)):
                return [str(library)]
    return ["-fopenmp"]


def _compile_command(toolchain: Toolchain, source: Path, target: Path) -> list[str]:
    command = [*toolchain.compiler, *_FLAGS, "-c", str(source), "-o", str(target)]
    if not source.name.endswith("bindings.cpp"):
        return [*command, "-O3"]
    include = _TORCH / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *command,
        "-O1",  # glue: optimizing it would double the time of the whole build
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def _link_command(toolchain: Toolchain, objects: list[Path], target: Path) -> list[str]:
    is_clang = "clang" in toolchain.version.lower()
    return [
        *toolchain.compiler,
        "-shared",
        *map(str, objects),
        "-o",
        str(target),
        f"-L{_TORCH / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        *(["-fopenmp"] if is_clang else _torch_openmp()),  # clang's calls need its own runtime
    ]


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower():
            return line
    return lines[0] if lines else "no message"


def _slowest_first(source: Path) -> tuple[bool, int]:
    return not source.name.endswith("bindings.cpp"), -source.stat().st_size


def _run_all(commands: list[list[str]], folder: Path) -> str | None:
    """Run commands, as many at once as there are cores; the first error, or None."""
    limit = os.cpu_count() or 1
    running: list[subprocess.Popen[str]] = []
    error: str | None = None
    for command in [*commands, None]:
        while running and (command is None or len(running) >= limit):
            process = running.pop(0)
            output, _ = process.communicate()
            if process.returncode != 0 and error is None:
                error = first_error(output)
        if command is None or error is not None:
            continue
        running.append(
            subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return error


def compile_library(toolchain: Toolchain, library: Path) -> str | None:
    """Build `library`; the compiler's first error line, or None when all went well."""
    folder = library.parent
    # the slowest first, so that the others fit beside it
    order = sorted(sources(), key=_slowest_first)
    objects = [folder / f"{source.stem}.o" for source in order]
    compiles = [_compile_command(toolchain, s, o) for s, o in zip(order, objects, strict=True)]
    error = _run_all(compiles, folder)
    if error is None:
        error = _run_all([_link_command(toolchain, objects, library)], folder)
    for path in objects:
        path.unlink(missing_ok=True)
    return error
