"""Makes the interpreter of triton 3.6 to 3.9 (TRITON_INTERPRET=1) compute what GPUs compute, and
take half the time.

- 3.6 stores a scalar as a one-element array and converts it to a loop bound with `int(array)`,
  which numpy 2.4 supports only for 0-dimensional arrays.
- 3.7 cannot use a global constexpr times a tensor: Python makes a constexpr of the product, where
  the compiler makes a tensor.
- 3.6 and 3.7 truncate float32 to bfloat16, while GPUs round to nearest: twice the error, always
  toward zero.
- 3.6 and 3.7 patch `triton.language` with their own functions at each launch and again at each
  call of a device function, although only the first patch of a launch changes anything.
- All say that results of a comparison have the type of what was compared. A block made of such a
  scalar has numbers in place of truth values, which 3.9 refuses as a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton import knobs
from triton.language.semantic import TritonSemantic


def repair() -> None:
    """Patch the interpreter if it is enabled. Call once."""
    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
        if (source, to, rounding_mode) != (tl.float32, tl.bfloat16, None):
            return convert(data, source, to, rounding_mode)
        return to_bfloat16(data)

    interpreter._convert_float = rounded
    to_tensor = TritonSemantic.to_tensor

    def unwrapped(semantic: Any, value: Any, check_type: bool = True) -> Any:
        is_constant = isinstance(value, tl.constexpr)
        return to_tensor(semantic, value.value if is_constant else value, check_type)

    TritonSemantic.to_tensor = unwrapped
    compute = interpreter.InterpreterBuilder.binary_op

    def with_truth_values(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = compute(builder, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    interpreter.InterpreterBuilder.binary_op = with_truth_values
    _patch_once_a_launch(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Patch each module of `triton.language` only once per launch."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    nothing = interpreter._LangPatchScope()
    patched: set[int] = set()  # modules, by id

    def patch_once(function: Any) -> Any:
        names = function.__globals__.values()
        modules = {id(value) for value in names if value is tl or value is tl.core}
        if modules and modules <= patched:
            return nothing
        patched.update(modules)
        return patch(function)

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # the end of the last launch restored the original functions
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bfloat16 bits of float32 numbers, rounded to nearest with ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(values), quiet, nearest).astype(np.uint16)
