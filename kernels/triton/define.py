"""Registers the Triton version of an op: `llmc_triton::x`, with the schema of `llmc::x`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.registry import Fn, Impl, Op
from llmc.kernels.triton.launch import KernelError, Plan, interpreted

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available() -> bool:
    return interpreted() or torch.cuda.is_available()


def needs_upcast(dtype: torch.dtype) -> bool:
    """The interpreter's dot multiplies the bits of bfloat16 as if they were integers."""
    return interpreted() and dtype == torch.bfloat16


def dot_precision(dtype: torch.dtype) -> str:
    """The `input_precision` of products in a kernel for tensors of `dtype`: exact for float32.

    Triton knows "tf32" on NVIDIA's GPUs and, of AMD's, on gfx942 alone. To operands in 16 bits it
    means nothing.
    """
    return "ieee" if dtype == torch.float32 or torch.version.hip is not None else "tf32"


def on_device(*tensors: Tensor) -> bool:
    """Whether all are on the device type that Triton runs on."""
    kind = "cpu" if interpreted() else "cuda"
    return all(t.device.type == kind for t in tensors)


def supports_tensors(*tensors: Tensor | None) -> bool:
    """Whether all are on Triton's device type, with supported dtypes and contiguous last
    dimensions."""
    return all(
        on_device(t) and t.dtype in DTYPES and (t.shape[-1] == 1 or t.stride(-1) == 1)
        for t in tensors
        if t is not None
    )


def token_stride(numbers: Tensor | None) -> int:
    """The stride between tokens for numbers [H] or [T, H]; 0 if all tokens share them."""
    return numbers.stride(0) if numbers is not None and numbers.dim() == 2 else 0


def same_dtype(*tensors: Tensor | None) -> bool:
    return len({t.dtype for t in tensors if t is not None}) == 1


def define(
    op: Op, *, supports: Fn, plan: Callable[..., Plan[Any]] | None = None, run: Fn | None = None
) -> None:
    """Register a Triton version of `op`. `plan` makes its launches from the arguments; if it takes
    more than launches, `run` computes the result instead.

    Where a kernel of it can't be compiled, the reference computes the result. So an op changes its
    arguments in its last launch only, or in others to what the reference writes there too.
    """
    compute = _or_reference(op, run or _runner(plan))
    overload = op.declare("llmc_triton", compute)
    op.impl(
        Impl(
            name="triton", op=lambda: overload, available=available, supports=supports, run=compute
        )
    )


def _runner(plan: Callable[..., Plan[Any]] | None) -> Fn:
    assert plan is not None, "an op needs either plan or run"
    return lambda *args: plan(*args).run()


def _or_reference(op: Op, run: Fn) -> Fn:
    is_reported = False

    def compute(*args: Any) -> Any:
        nonlocal is_reported
        try:
            return run(*args)
        except KernelError as error:
            if not is_reported:
                is_reported = True
                logger.warning(
                    "%s runs its reference implementation, which is slow, where its kernel can't "
                    "be compiled for this GPU: %s",
                    op.name, error,
                )  # fmt: skip
        return op.reference(*args)

    return compute
