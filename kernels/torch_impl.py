"""Fast versions of ops that are written in torch itself: all requests at once, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmc.kernels.registry import Fn, Impl, Op

_LIBRARY = torch.library.Library("llmc_torch", "FRAGMENT")


def torch_impl(op: Op, supports: Fn = lambda *args: True) -> Callable[[Fn], Fn]:
    """Decorator: `llmc_torch::<op>`, with the same arguments as `op`; the last resort but one."""

    def define(fn: Fn) -> Fn:
        schema = op.overload._schema
        text = str(schema).partition("::")[2]
        _LIBRARY.define(text)
        _LIBRARY.impl(op.name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"llmc_torch::{op.name}", _fake_of(op), lib=_LIBRARY)
        overload = getattr(torch.ops.llmc_torch, op.name).default
        op.impl(Impl(name="torch", op=lambda: overload, available=lambda: True, supports=supports))
        return fn

    return define


def _fake_of(op: Op) -> Callable[..., Any]:
    return lambda *args: op.overload(*args)
