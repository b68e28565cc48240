"""Makes triton 3.6's interpreter (TRITON_INTERPRET=1) work with numpy 2.4 and later.

The interpreter keeps a scalar as an array of one element and turns it to a loop bound with
`int(array)`, which numpy now refuses for all but arrays of no dimension.
"""

from __future__ import annotations

from typing import Any

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
