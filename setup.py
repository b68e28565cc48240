"""Adds to a wheel the library of C++ ops, with every level of instructions of one processor.

Which processor: the one that the C++ compiler ($CXX, else g++ or clang++) compiles for, so
CXX=aarch64-linux-gnu-g++ makes a wheel for aarch64. LLMC_WHEEL_LEVELS names the levels, separated
by commas, where not all are wanted. Without a compiler, or with LLMC_WHEEL_LEVELS=none, the wheel
holds no library and fits any machine. All else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def load(name: str, path: str) -> ModuleType:
    """A module of llmc alone: the packages around it import torch, which a build does not need."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load("llmc.errors", "llmc/errors.py")
load("llmc.control_groups", "llmc/control_groups.py")
levels = load("llmc.kernels.cpu.levels", "kernels/cpu/levels.py")
compiling = load("llmc.kernels.cpu.compile", "kernels/cpu/compile.py")


def target() -> tuple[str, list[Any]] | None:
    """The machine that the compiler compiles for, and the levels; None: no library."""
    toolchain = compiling.find_toolchain()
    wanted = os.environ.get("LLMC_WHEEL_LEVELS", "")
    if toolchain is None or wanted == "none":
        return None
    asked = [*toolchain.compiler, "-dumpmachine"]
    triple = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    machine = triple.partition("-")[0]
    ladder = levels.ladder(machine) if "linux" in triple else ()
    names = wanted.split(",") if wanted else [level.name for level in ladder]
    chosen = [level for level in ladder if level.name in names]
    if len(chosen) < len(names):
        known = ", ".join(level.name for level in ladder) or "none"
        raise SystemExit(f"LLMC_WHEEL_LEVELS={wanted}: the levels of {machine} are: {known}")
    return (machine, chosen) if chosen else None


class BuildPackage(build_py):
    """build_py, and the library."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib).resolve() / "llmc/kernels/cpu/prebuilt"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        made_for = target()
        if self.editable_mode or made_for is None:
            return
        folder.mkdir(parents=True)

        def tell(done: int, count: int) -> None:
            print(f"building the C++ ops, {done} of {count} files", flush=True)

        toolchain = compiling.find_toolchain()
        error = compiling.compile_library(toolchain, made_for[1], folder / "ops.so", tell)
        if error is not None:
            raise SystemExit(f"{toolchain.command} failed: {error}")


class Wheel(bdist_wheel):
    """bdist_wheel, for one machine where the library is in it, and for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        made_for = target()
        return ("py3", "none", f"linux_{made_for[0]}" if made_for else "any")


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
