"""The ops and their implementations: schema, reference, shape function, and the fast versions.

An op `llmc::x` is defined by its reference: plain PyTorch, obviously right, slow. It is the
definition, the fallback and the oracle of the tests. A fast version is an op of another namespace
(`llmc_cpu::x` from C++, `llmc_triton::x`), so that a printed graph shows what will run. It has the
schema and the shape function of the reference. `Op.best` chooses among the versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

PREFER = ("triton", "cpu", "torch")  # the fast versions in order of preference
Fn = Callable[..., Any]
Case = tuple[Any, ...]
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """A fast version of an op.

    `supports` is called with the arguments by name, as fake or real tensors; it names those that it
    checks and accepts the others as `**others`. It must be cheap.
    """

    name: str  # one of PREFER
    op: Callable[[], Any]  # returns the OpOverload; a callable, as C++ ops exist only once built
    available: Callable[[], bool]
    supports: Fn = lambda **arguments: True
    run: Fn | None = None  # a direct call that avoids the dispatcher's overhead, if there is one


@dataclass(slots=True, kw_only=True)
class Op:
    """One op: its reference, its fast versions, and the inputs that tests and benchmarks share.

    `shape` returns empty outputs for fake arguments given by name.
    """

    name: str
    reference: Fn
    shape: Fn
    defaults: Mapping[str, Any]  # every argument's name in order; `Parameter.empty` for none
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

    def bind(
        self, args: Sequence[Any], keywords: Mapping[str, Any] = _NO_KEYWORDS
    ) -> dict[str, Any]:
        """A call's arguments by name, with defaults; TypeError if they do not match the op."""
        bound = {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **keywords}
        missing = [name for name, value in bound.items() if value is inspect.Parameter.empty]
        if missing or len(bound) > len(self.defaults) or len(args) > len(self.defaults):
            raise TypeError(
                f"{self.name} takes {', '.join(self.defaults)}; got {len(args)} positional "
                f"arguments and {sorted(keywords)}"
            )
        return bound

    def best(
        self,
        args: Sequence[Any],
        *,
        prefer: Sequence[str] = PREFER,
        present: Container[str] | None = None,
    ) -> Impl | None:
        """The first version, in the order of `prefer`, that is available and supports `args`.

        `present` names the versions to treat as available, regardless of this machine.
        """
        bound = self.bind(args)
        for name in prefer:
            for impl in self.impls:
                if impl.name == name:
                    is_there = impl.available() if present is None else name in present
                    if is_there and impl.supports(**bound):
                        return impl
        return None

    def run(self, *args: Any, prefer: Sequence[str] = PREFER) -> Any:
        """Call the best version in the order of `prefer`, or the reference if there is none.

        For calls outside a graph; in a graph, `lower_kernels` chooses once.
        """
        impl = self.best(args, prefer=prefer)
        return self.reference(*args) if impl is None else (impl.run or impl.op())(*args)

    def impl(self, impl: Impl) -> Impl:
        self.impls.append(impl)
        return impl

    def cases(self, maker: Callable[[torch.device, torch.dtype], Iterator[Case]]) -> Any:
        """Decorator: `maker(device, dtype)` yields argument tuples for tests and benchmarks."""
        self.case_makers.append(maker)
        return maker

    def declare(self, namespace: str, run: Fn | None = None) -> Any:
        """Define `<namespace>::<name>` with this op's schema and shape function.

        Returns its overload.

        `run`: its kernel for every device. Without it, a loaded library provides the kernel.
        """
        library = _library(namespace)
        library.define(str(self.overload._schema).partition("::")[2])
        if run is not None:
            library.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{self.name}", self._fake, lib=library)
        return getattr(getattr(torch.ops, namespace), self.name).default

    def _fake(self, *args: Any, **keywords: Any) -> Any:
        return self.shape(**self.bind(args, keywords))


OPS: dict[str, Op] = {}
_LIBRARIES: dict[str, torch.library.Library] = {}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _LIBRARIES[namespace]


def op(*, mutates: tuple[str, ...] = (), shape: Fn | str | None = None) -> Callable[[Fn], Op]:
    """Define `llmc::<function name>` with the decorated function as its reference.

    `shape` returns empty outputs for the arguments, given by name: it names those that it needs and
    accepts the others as `**others`. It can also be the name of an argument: then there is one new,
    contiguous output like that argument. Without it the reference itself is traced, which is right
    for short pointwise ops. An op that returns nothing needs no `shape`.
    """

    def define(reference: Fn) -> Op:
        name = reference.__name__
        if name in OPS:
            raise ValueError(f"op {name!r} is defined twice")
        signature = inspect.signature(reference)
        schema = torch.library.infer_schema(reference, mutates_args=mutates)
        # Not torch.library.custom_op: that imports the compiler, seconds at every start.
        library = _library("llmc")
        library.define(name + schema)
        library.impl(name, reference, "CompositeExplicitAutograd")
        made = Op(
            name=name,
            reference=reference,
            shape=_shape_of(reference, signature, shape),
            defaults={name: p.default for name, p in signature.parameters.items()},
            mutates=mutates,
        )
        torch.library.register_fake(f"llmc::{name}", made._fake, lib=library)
        OPS[name] = made
        return made

    return define


def _shape_of(reference: Fn, signature: inspect.Signature, shape: Fn | str | None) -> Fn:
    if isinstance(shape, str):
        return lambda **arguments: arguments[shape].new_empty(arguments[shape].shape)
    if shape is None and signature.return_annotation in (None, "None"):
        return lambda **arguments: None
    return shape or reference
