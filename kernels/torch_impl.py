"""Fast versions of ops that are written in torch itself: all requests at once, on any device."""

from __future__ import annotations

from collections.abc import Callable

from llmc.kernels.registry import Fn, Impl, Op


def torch_impl(op: Op, supports: Fn = lambda **arguments: True) -> Callable[[Fn], Fn]:
    """Decorator: `llmc_torch::<op>`, with the arguments of `op`; chosen before the reference."""

    def define(fn: Fn) -> Fn:
        overload = op.declare("llmc_torch", fn)
        op.impl(Impl(name="torch", op=lambda: overload, available=lambda: True, supports=supports))
        return fn

    return define
