"""Importing this makes the interpreter of triton 3.6 to 3.8 three times as fast.

It spends nearly all of its time on descriptions: every operation creates objects for the types of
its operands, results and shapes, which nothing reads afterwards, and compares shapes number by
number, also those of operands that need no conversion. Every integer sum, difference and
product is also computed a second time in 64 bits, for an overflow check that only runs with
`InterpreterOptions.debug`, which the interpreter never sets.
"""

from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_make_block, _make_tuple, _np_dtype = (
    core.block_type.__init__,
    core.tuple.__init__,
    interpreter._get_np_dtype,
)
_blocks: dict[Any, Any] = {}
_np_dtypes: dict[str, Any] = {}


def _block(cls: Any, element: Any, shape: Any) -> Any:
    """One shared object per block type."""
    sizes = builtins.tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
    made = _blocks.get((element.name, sizes))
    if made is None:
        made = _blocks[element.name, sizes] = object.__new__(cls)
        _make_block(made, element, shape)
        made.constants = core.tuple([core.constexpr(size) for size in sizes])
        made.sizes = sizes
    return made


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape = type.constants if type.is_block() else _NO_SHAPE
    self.numel = core.constexpr(type.numel if type.is_block() else 1)


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    if type is not None:
        _make_tuple(self, args, type)
    else:
        self.values = list(args)


def _type_of_tuple(self: Any) -> Any:
    if "_type" not in self.__dict__:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _unwrapped(value: Any, original: Any = core._unwrap_if_constexpr) -> Any:
    if isinstance(value, core.constexpr):
        return value.value
    listed = isinstance(value, list | builtins.tuple | core.tuple)
    return original(value) if listed else value


def _same_dtype(self: Any, other: Any, original: Any = core.dtype.__eq__) -> bool:
    return self is other or original(self, other)


def _numpy_dtype(type: Any) -> Any:
    name = type.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(type.scalar)
    return _np_dtypes[name]


def _broadcast(
    self: Any, lhs: Any, rhs: Any, original: Any = TritonSemantic.broadcast_impl_value
) -> Any:
    """Both operands in their common shape. The original does it for one of fewer dimensions, and
    reports shapes that differ."""
    left, right = lhs.type.sizes, rhs.type.sizes
    if left == right:
        return lhs, rhs
    if left == ():
        return self.splat(lhs, list(right)), rhs
    if right == ():
        return lhs, self.splat(rhs, list(left))
    fits = all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=False))
    if len(left) != len(right) or not fits:
        return original(self, lhs, rhs)
    sizes = builtins.tuple(map(max, left, right))
    return _broadcast_to(self, lhs, sizes), _broadcast_to(self, rhs, sizes)


def _broadcast_to(semantic: Any, x: Any, sizes: builtins.tuple[int, ...]) -> Any:
    if x.type.sizes == sizes:
        return x
    handle = semantic.builder.create_broadcast(x.handle, sizes)
    return semantic.tensor(handle, core.block_type(x.type.scalar, list(sizes)))


# Operands of one of these types are not converted.
_KEPT = (core.float32, core.int32, core.int64)


def _check_operands(
    self: Any, lhs: Any, rhs: Any, *rules: bool,
    original: Any = TritonSemantic.binary_op_type_checking_impl, **more: bool,
) -> Any:  # fmt: skip
    if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
        dtype = lhs.dtype
        if dtype is rhs.dtype and dtype in _KEPT:
            return _broadcast(self, lhs, rhs)
    return original(self, lhs, rhs, *rules, **more)


core.tuple.__init__ = _init_tuple
core.tuple.type = property(_type_of_tuple, lambda self, type: self.__dict__.update(_type=type))
_NO_SHAPE = core.tuple([])
core.block_type.__new__, core.block_type.__init__ = _block, lambda self, element, shape: None
core.tensor.__init__ = _init_tensor
core._unwrap_if_constexpr = _unwrapped
core.dtype.__eq__ = _same_dtype
core.dtype.sizes = ()  # of scalars
interpreter._get_np_dtype = _numpy_dtype
TritonSemantic.broadcast_impl_value = _broadcast
TritonSemantic.binary_op_type_checking_impl = _check_operands
builder = interpreter.interpreter_builder
assert not builder.options.debug, "overflow is checked now: leave the check on"
builder.options = replace(builder.options, sanitize_overflow=False)
