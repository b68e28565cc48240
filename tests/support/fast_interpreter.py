"""Importing this makes the interpreter of triton 3.6 to 3.9 up to eight times as fast.

It spends nearly all of its time on descriptions: every operation creates objects for the types of
its operands, results and shapes, which nothing reads afterwards, and compares shapes number by
number, also those of operands that need no conversion. A number beside a tensor becomes a tensor
twice, then a block. Numbers of 8 and 16 bits are converted bit by bit, although a table has
them all. Every integer sum, difference and product is also computed a second time in 64 bits, for
an overflow check that only runs with `InterpreterOptions.debug`, which the interpreter never sets.
"""

from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import llmc.kernels.triton  # noqa: F401 - repairs the interpreter that is made faster here

_make_block, _make_tuple, _np_dtype, _convert = (
    core.block_type.__init__,
    core.tuple.__init__,
    interpreter._get_np_dtype,
    interpreter._convert_float,
)
_blocks: dict[Any, Any] = {}
_np_dtypes: dict[str, Any] = {}
_numbers: dict[Any, Any] = {}
_converted: dict[Any, Any] = {}


def _block(cls: Any, element: Any, shape: Any) -> Any:
    """One shared object per block type."""
    given = shape.values if isinstance(shape, core.tuple) else shape
    sizes = builtins.tuple([s.value if isinstance(s, core.constexpr) else s for s in given])
    made = _blocks.get((element.name, sizes))
    if made is None:
        made = _blocks[element.name, sizes] = object.__new__(cls)
        _make_block(made, element, list(sizes))
        made.constants = core.tuple([core.constexpr(size) for size in sizes])
        made.count = core.constexpr(made.numel)
        made.sizes = sizes
    return made


def _with_element_ty(self: Any, element: Any) -> Any:
    return _blocks.get((element.name, self.sizes)) or core.block_type(element, self.shape)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.constants, type.count


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    if type is not None:
        _make_tuple(self, args, type)
    else:
        self.values = list(args)


def _type_of_tuple(self: Any) -> Any:
    if "_type" not in self.__dict__:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


_PLAIN = {int, float, bool, type(None), core.tensor}


def _unwrapped(value: Any, original: Any = core._unwrap_if_constexpr) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, core.constexpr):
        return value.value
    listed = isinstance(value, list | builtins.tuple | core.tuple)
    return original(value) if listed else value


def _to_tensor(
    self: Any, value: Any, check_type: bool = True, original: Any = TritonSemantic.to_tensor
) -> Any:
    return value if type(value) is core.tensor else original(self, value, check_type)


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


# Operands of one of these types are not converted, and numbers beside the first take their type.
_TAKE_NUMBERS = {"fp32", "int32", "int64"}
_KEPT = {*_TAKE_NUMBERS, "int1", "int8", "int16", "uint8", "uint16", "uint32", "uint64"}


def _check_operands(
    self: Any, lhs: Any, rhs: Any, *rules: bool,
    original: Any = TritonSemantic.binary_op_type_checking_impl, **more: bool,
) -> Any:  # fmt: skip
    """The operands of an element-wise operation, as one type. Their data keep their own shapes:
    numpy brings them together when it computes the result."""
    left, right = isinstance(lhs, core.tensor), isinstance(rhs, core.tensor)
    if left and right:
        dtype, other = lhs.dtype, rhs.dtype
        if (dtype is other and dtype.name in _KEPT) or _is_offset(dtype, other, rules):
            pair = _with_common_type(lhs, rhs)
            if pair is not None:
                return pair
    elif left and _takes(lhs.dtype, rhs, rules):
        return lhs, _number(self, rhs, lhs.type)
    elif right and _takes(rhs.dtype, lhs, rules):
        return _number(self, lhs, rhs.type), rhs
    return original(self, lhs, rhs, *rules, **more)


def _is_offset(dtype: Any, other: Any, rules: builtins.tuple[bool, ...]) -> bool:
    """Whether the right operand is added to pointers on the left."""
    offset = other is core.int32 or other is core.int64
    return offset and rules[:1] == (True,) and isinstance(dtype, core.pointer_type)


def _with_common_type(lhs: Any, rhs: Any) -> Any:
    """None for shapes that need dimensions or do not fit, which the original handles."""
    left, right = lhs.type.sizes, rhs.type.sizes
    if left == right:
        return lhs, rhs
    if left == ():
        return _as_if(lhs, right), rhs
    if right == ():
        return lhs, _as_if(rhs, left)
    fits = all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=False))
    if len(left) != len(right) or not fits:
        return None
    sizes = builtins.tuple(map(max, left, right))
    return _as_if(lhs, sizes), _as_if(rhs, sizes)


def _as_if(x: Any, sizes: builtins.tuple[int, ...]) -> Any:
    """The same data, described as a block of these sizes."""
    return x if x.type.sizes == sizes else core.tensor(x.handle, core.block_type(x.dtype, sizes))


def _takes(dtype: Any, number: Any, rules: builtins.tuple[bool, ...]) -> bool:
    """Whether this number beside a tensor of this type becomes one of the same type, unchecked."""
    if rules[2:3] == (False,):  # no arithmetic check
        return False
    if type(number) is int:
        return dtype.name in _TAKE_NUMBERS and -(2**31) <= number < 2**31
    return type(number) is float and dtype is core.float32 and number == number


def _number(semantic: Any, number: Any, type: Any) -> Any:
    """One shared tensor per number, type and shape, which nothing can write to."""
    key = type.scalar.name, type.sizes, number
    made = _numbers.get(key)
    if made is None:
        made = semantic.scalar_constant(number, dtype=type.scalar)
        made.handle.data.flags.writeable = False
        made = _numbers[key] = _as_if(made, type.sizes)
    return made


def _expand_dims(self: Any, x: Any, axis: int) -> Any:
    shape = x.data.shape
    data = x.data.reshape((*shape[:axis], 1, *shape[axis:]))
    return interpreter.TensorHandle(data, x.dtype.scalar)


def _convert_float(data: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
    bits = source.primitive_bitwidth
    if bits > 16:
        return _convert(data, source, to, rounding_mode)
    codes = np.dtype(f"uint{bits}")
    key = source.name, to.name, rounding_mode
    if key not in _converted:
        _converted[key] = _convert(np.arange(2**bits, dtype=codes), source, to, rounding_mode)
    return _converted[key][data.view(codes)]


_patched: set[Any] = set()  # functions whose modules are
_NOTHING = interpreter._LangPatchScope()


def _patch_lang(function: Any, original: Any = interpreter._patch_lang) -> Any:
    """`triton.language` stays as it was patched: nothing in this process uses it otherwise."""
    if function not in _patched:
        _patched.add(function)
        names = function.__globals__.values()
        modules = frozenset(id(value) for value in names if value is tl or value is core)
        if modules not in _patched:
            _patched.add(modules)
            original(function)
    return _NOTHING


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Like the original, but its function skips the check of what it passes."""
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


core.tuple.__init__ = _init_tuple
core.tuple.type = property(_type_of_tuple, lambda self, type: self.__dict__.update(_type=type))
core.block_type.__new__, core.block_type.__init__ = _block, lambda self, element, shape: None
core.block_type.with_element_ty = _with_element_ty
core.block_type.to_ir = lambda self, builder: self
core.tensor.__init__ = _init_tensor
core._unwrap_if_constexpr = _unwrapped
core.dtype.__eq__ = _same_dtype
core.dtype.sizes, core.dtype.constants = (), core.tuple([])  # of scalars
core.dtype.count = core.constexpr(1)
interpreter._get_np_dtype = _numpy_dtype
interpreter._convert_float = _convert_float
interpreter._patch_attr, interpreter._patch_lang = _patch_attr, _patch_lang
interpreter.InterpreterBuilder.create_expand_dims = _expand_dims
TritonSemantic.broadcast_impl_value, TritonSemantic.to_tensor = _broadcast, _to_tensor
TritonSemantic.binary_op_type_checking_impl = _check_operands
builder = interpreter.interpreter_builder
assert not builder.options.debug, "overflow is checked now: leave the check on"
builder.options = replace(builder.options, sanitize_overflow=False)
