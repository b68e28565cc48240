"""A kernel with its grid, arguments and launch options, before it runs.

Each op of this package first plans its launches from shapes only, then runs them. The ahead-of-time
tests make the same plan from meta tensors and compile it for GPUs that this machine does not have,
so they measure exactly what a GPU would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.errors import TritonError
from triton.runtime.errors import InterpreterError

from llmc.control_groups import available_cores

T = TypeVar("T")
_COMPILERS = 8  # threads; most of their time they are outside of Python
_H100_MULTIPROCESSORS = 132
_INTERPRETED_MULTIPROCESSORS = 3  # few: programs run one after the other, in Python
_only_compiles = ContextVar("_only_compiles", default=False)

_REFUSED = (  # by Triton's passes, and by the driver before it launches anything
    "PassManager::run failed",
    "too many resources requested for launch",
)
_uncompilable: dict[str, KernelError] = {}  # by variant, so that the compiler is asked only once


def interpreted() -> bool:
    """TRITON_INTERPRET=1: kernels run as Python on CPU tensors (tests)."""
    return bool(knobs.runtime.interpret)


class KernelError(RuntimeError):
    """A kernel cannot be compiled for this GPU, or needs more than it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`args` are runtime values, `constants` the kernel's constexpr parameters, both by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    pdl: bool = False  # can start before the previous kernel ends, and waits for it inside
    max_registers: int | None = None  # per thread, of NVIDIA GPUs; None: the compiler's choice

    def run(self) -> None:
        """Queue the kernel. Raises KernelError, before anything is queued, if there is none."""
        if 0 in self.grid:
            return
        if _uncompilable and (known := _uncompilable.get(self._variant())) is not None:
            raise known
        try:
            self._compile() if _only_compiles.get() else self._queue()
        except Exception as error:
            if not _is_compilers(error):
                raise
            made = KernelError(f"{self.kernel.__name__}: {_first_line(error)}")
            _uncompilable[self._variant()] = made
            raise made from error

    def _queue(self) -> None:
        self.kernel[self.grid](**self._options())

    def _compile(self) -> None:
        self.kernel.run(grid=self.grid, warmup=True, **self._options())

    def _options(self) -> dict[str, Any]:
        pdl = {"launch_pdl": True} if self.pdl else {}
        return {**self.args, **self.constants, **self.compiler_options(), **pdl}

    def compiler_options(self) -> dict[str, Any]:
        """What the compiler is told besides the constants and the GPU."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # Triton 3.9 warns where this is left to it, and 3.10 will not by default
            "enable_fp_fusion": True,
            **({"maxnreg": self.max_registers} if self.max_registers else {}),
        }

    def _variant(self) -> str:
        """What is the same for launches that share compiled code, and usually nothing else is."""
        dtypes = [value.dtype for value in self.args.values() if isinstance(value, Tensor)]
        options = self.num_warps, self.num_stages, self.max_registers, self.constants, dtypes
        return f"{self.kernel.__name__} {options}"


def _is_compilers(error: Exception) -> bool:
    """Whether this is about compiling or loading a kernel, and not about running one."""
    if isinstance(error, InterpreterError):  # which runs kernels: a mistake in one
        return False
    if isinstance(error, TritonError):  # in the source, from ptxas, or out of resources
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[T]):
    """What an op returns, and the launches that fill it, in order."""

    out: T
    launches: tuple[Launch, ...]

    def run(self) -> T:
        for launch in self.launches:
            launch.run()
        if _only_compiles.get():  # other ops may use the results as indices
            for made in tree_leaves(self.out):
                if isinstance(made, Tensor):
                    made.zero_()
        return self.out


@contextmanager
def compiling_together() -> Iterator[None]:
    """Within this, kernels are not run but compiled, several at a time; results are zeros.

    On leaving, all are compiled. One that cannot be is reported when it is to run."""
    with (
        ThreadPoolExecutor(min(_COMPILERS, available_cores())) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)


@lru_cache
def _cuda_multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index or 0).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the GPU; an H100's if there is no GPU."""
    if device.type == "cuda":
        return _cuda_multiprocessors(device.index)
    return _INTERPRETED_MULTIPROCESSORS if interpreted() else _H100_MULTIPROCESSORS


def power_of_2(n: int, at_least: int = 1) -> int:
    """The smallest power of two that is >= n and >= at_least."""
    return max(at_least, 1 << (n - 1).bit_length() if n > 0 else 1)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
