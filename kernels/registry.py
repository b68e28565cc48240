"""The list of ops and of who implements each: schema, reference, and the fast versions by name.

An op `llmc::x` is defined by its reference: plain PyTorch, obviously right, slow. It is the
meaning, the fallback and the oracle of the tests. A fast version is an op of its own with the
same arguments (`llmc_cpu::x` from C++, `llmc_triton::x`), so that a printed graph names what will
run; `Op.best` picks among them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PREFER = ("triton", "cpu", "torch")  # the fast versions that may serve, best first
Fn = Callable[..., Any]
Case = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """A fast version of an op. `supports(*args)` sees fake or real tensors and must be cheap."""

    name: str  # one of PREFER
    op: Callable[[], Any]  # the OpOverload; a call, since C++ ops exist only once built
    available: Callable[[], bool]
    supports: Fn = lambda *args: True
    run: Fn | None = None  # the same without the dispatcher, where that costs less


@dataclass(slots=True, kw_only=True)
class Op:
    """One op: its reference, its fast versions, and the inputs that tests and benchmarks share."""

    name: str
    reference: Fn
    mutates: tuple[str, ...] = ()
    impls: list[Impl] = field(default_factory=list)
    case_makers: list[Callable[[torch.device, torch.dtype], Iterator[Case]]] = field(
        default_factory=list
    )

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.llmc, self.name).default

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def best(
        self,
        args: Sequence[Any],
        *,
        prefer: Sequence[str] = PREFER,
        present: Container[str] | None = None,
    ) -> Impl | None:
        """The first version, in the order of `prefer`, that is there and takes `args`.

        `present` names what is to count as there, instead of what is.
        """
        for name in prefer:
            for impl in self.impls:
                if impl.name == name:
                    is_there = impl.available() if present is None else name in present
                    if is_there and impl.supports(*args):
                        return impl
        return None

    def run(self, *args: Any) -> Any:
        """Call the best version, the reference failing that.

        For calls outside a graph; inside one, `lower_kernels` chooses once.
        """
        impl = self.best(args)
        return self.reference(*args) if impl is None else (impl.run or impl.op())(*args)

    def impl(self, impl: Impl) -> Impl:
        self.impls.append(impl)
        return impl

    def cases(self, maker: Callable[[torch.device, torch.dtype], Iterator[Case]]) -> Any:
        """Decorator: `maker(device, dtype)` yields argument tuples for tests and benchmarks."""
        self.case_makers.append(maker)
        return maker


OPS: dict[str, Op] = {}
_LIBRARY = torch.library.Library("llmc", "FRAGMENT")


def op(*, mutates: tuple[str, ...] = (), fake: Fn | None = None) -> Callable[[Fn], Op]:
    """Define `llmc::<function name>` with the decorated function as its reference.

    `fake` gives shapes and dtypes only (torch.library.register_fake); without it the reference
    itself is traced, which is right for short pointwise ops.
    """

    def define(reference: Fn) -> Op:
        name = reference.__name__
        if name in OPS:
            raise ValueError(f"op {name!r} is defined twice")
        schema = torch.library.infer_schema(reference, mutates_args=mutates)
        # Not torch.library.custom_op: that imports the compiler, seconds at every start.
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"llmc::{name}", fake or reference, lib=_LIBRARY)
        OPS[name] = Op(name=name, reference=reference, mutates=mutates)
        return OPS[name]

    return define
