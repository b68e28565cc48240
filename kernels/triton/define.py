"""Registers a Triton version of an op: `llmc_triton::x`, with the schema of `llmc::x`."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from llmc.kernels.registry import Fn, Impl, Op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """TRITON_INTERPRET=1: kernels run as Python on CPU tensors (tests)."""
    return bool(knobs.runtime.interpret)


def available() -> bool:
    return interpreted() or torch.cuda.is_available()


def needs_upcast(dtype: torch.dtype) -> bool:
    """The interpreter's dot multiplies the bits of bfloat16 as if they were integers."""
    return interpreted() and dtype == torch.bfloat16


def takes(*tensors: Tensor | None) -> bool:
    """On the device that Triton serves, each of a supported dtype with a dense last dimension."""
    kind = "cpu" if interpreted() else "cuda"
    return all(
        t.device.type == kind and t.dtype in DTYPES and (t.shape[-1] == 1 or t.stride(-1) == 1)
        for t in tensors
        if t is not None
    )


def same_dtype(*tensors: Tensor | None) -> bool:
    return len({t.dtype for t in tensors if t is not None}) == 1


def define(op: Op, run: Fn, *, fake: Fn, supports: Fn) -> None:
    """`run` fills real tensors; `fake` gives shapes and dtypes, always dense."""
    arguments = str(op.overload._schema).removeprefix(f"llmc::{op.name}")
    custom = torch.library.custom_op(
        f"llmc_triton::{op.name}", run, mutates_args=op.mutates, schema=arguments
    )
    custom.register_fake(fake)
    op.impl(
        Impl(
            name="triton",
            op=lambda: getattr(torch.ops.llmc_triton, op.name).default,
            available=available,
            supports=supports,
            run=run,
        )
    )
