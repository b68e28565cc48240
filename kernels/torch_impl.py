"""Fast versions of ops written in PyTorch: all requests at once, on any device."""

from __future__ import annotations

from collections.abc import Callable

from llmc.kernels.registry import Fn, Impl, Op


def torch_impl(op: Op, supports: Fn = lambda **arguments: True) -> Callable[[Fn], Fn]:
    """Decorator: define `llmc_torch::<op>`, which takes `op`'s arguments and is preferred to its
    reference."""

    def define(fn: Fn) -> Fn:
        overload = op.declare("llmc_torch", fn)
        op.impl(Impl(name="torch", op=lambda: overload, available=lambda: True, supports=supports))
        return fn

    return define
