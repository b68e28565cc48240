"""Triton's own launch path on CPU tensors, as on an H100, without compiler and GPU.

Triton chooses a kernel's variant from the arguments of each launch: their types, which integers are
1, which values are multiples of 16. `install` replaces what is behind that choice, so each variant
that a GPU would compile is recorded and nothing runs. For a process of its own: it isn't undone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import llmc.kernels.triton  # noqa: F401 - registers the ops
from llmc.kernels.registry import OPS
from llmc.kernels.triton import dependent_launch, prompt_attention

_ON_CPU = {
    "on_device": lambda *tensors: True,
    "converts": lambda device: True,
}
_STATE_OPS = "llmc.kernels.triton.state"
_OF_ROWS = ("write_segments", "prepare_step", "record_tokens", "ban_words")  # step_rows.py


class _Driver:
    """The parts of Triton's driver that a launch uses."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """A compiled kernel that does nothing."""

    function = 0
    packed_metadata = ()

    def launch_metadata(self, *args: Any) -> None: ...

    def run(self, *args: Any) -> None: ...


def install() -> list[str]:
    """-> the variants of kernels that a GPU would have compiled, in order; it grows."""
    compiled: list[str] = []

    def compile_nothing(source: Any, **options: Any) -> _Kernel:
        names = list(source.signature)
        constants = {names[at[0]]: value for at, value in source.constants.items() if value}
        unaligned = [
            name
            for i, (name, kind) in enumerate(source.signature.items())
            if kind != "constexpr" and not source.attrs.get((i,))
        ]
        compiled.append(f"{source.fn.__name__} {constants}, not aligned: {unaligned}")
        return _Kernel()

    _replace(triton.compiler, compile=compile_nothing)
    triton.runtime.driver.set_active(_Driver())
    _accept_cpu_tensors()
    return compiled


def _accept_cpu_tensors() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("llmc.kernels.triton"):
            _replace(module, **{n: f for n, f in _ON_CPU.items() if hasattr(module, n)})
    _replace(sys.modules[_STATE_OPS], interpreted=lambda: True)
    _replace(dependent_launch, applies_to=lambda device: True)
    _replace(prompt_attention, has_flash=lambda device: True, flash=_no_flash)
    for op in OPS.values():
        for i, impl in enumerate(op.impls):
            if impl.name == "triton":
                supports = (lambda **a: True) if op.name in _OF_ROWS else impl.supports
                op.impls[i] = dataclasses.replace(impl, available=lambda: True, supports=supports)


def _replace(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def _no_flash(query: Tensor, *others: Tensor | Sequence[int] | float) -> Tensor:
    return torch.empty_like(query)
