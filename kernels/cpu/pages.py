"""Huge pages for large tensors: streaming weights is faster when fewer pages are looked up.

Linux gives them on request where /sys/kernel/mm/transparent_hugepage/enabled says `madvise`
(the usual setting). Anywhere else nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

_MADV_HUGEPAGE = 14  # madvise(2)
_PAGE = 4096
_LEAST_BYTES = 4 << 20  # two huge pages: below, the ends would not be covered


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages under a CPU tensor's memory, before it is first written; returns it."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and size >= _LEAST_BYTES and (madvise := _madvise()):
        start = -(-tensor.data_ptr() // _PAGE) * _PAGE
        end = (tensor.data_ptr() + size) // _PAGE * _PAGE
        # A refusal (no such pages on this system) changes nothing.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor
