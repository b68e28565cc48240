"""Makes triton 3.6's interpreter (TRITON_INTERPRET=1) work with numpy 2.4, round as GPUs do, and
take half the time.

The interpreter keeps a scalar as an array of one element and turns it to a loop bound with
`int(array)`, which numpy now refuses for all but arrays of no dimension. It cuts float32 off to
bfloat16, where GPUs round to nearest: twice the error, all of it towards zero. It puts its own
functions into `triton.language` at each launch and again at each call of a device function, though
only the first of a launch finds something left to replace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton import knobs


def repair() -> None:
    """Do nothing unless the interpreter is on. Call once."""
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
    _patch_once_a_launch(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Look through each module of `triton.language` once a launch."""
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
        patched.clear()  # the end of the last launch restored what its start had replaced
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 numbers, rounded to nearest with ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(values), quiet, nearest).astype(np.uint16)
