"""Huge pages for large tensors: streaming weights is faster when fewer pages are looked up.

Linux gives them on request where /sys/kernel/mm/transparent_hugepage/enabled says `madvise`
(the usual setting). Anywhere else nothing happens.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from llmc.background_thread import BackgroundThread

_MADV_DONTNEED = 4  # madvise(2): the pages go back to the system, and read as zeros from then on
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # makes pages present without changing them; Linux 5.14
_IDLE = 19  # the lowest priority
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_LEAST_BYTES = 2 * _HUGE_PAGE  # below, the ends would not be covered


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first and past the last page that lies wholly in the tensor's memory."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages under a CPU tensor's memory, before it is first written; returns it."""
    is_large = tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_BYTES
    if is_large and (madvise := _madvise()):
        start, end = _whole_pages(tensor)
        # A refusal (no such pages on this system) changes nothing.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


def give_back(tensors: Sequence[Tensor]) -> int:
    """Return the memory under CPU tensors to the system. -> bytes, 0 where that is not possible.

    The tensors stay, at their addresses, with undefined contents; what is written to takes memory
    again. Memory that the allocator keeps for later is returned too.
    """
    madvise = _madvise()
    if madvise is None:
        return 0
    given = 0
    for tensor in tensors:
        start, end = _whole_pages(tensor)
        if end > start and not madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED
        ):
            given += end - start
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    return given


def empty_in_huge_pages(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """`torch.empty` that, on CPU, begins with a huge page, so that all but the last part has some.

    What lies before it is never touched, and so takes addresses but no memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _HUGE_PAGE or _madvise() is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    room = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE
    advise_huge_pages(room)
    return room[start : start + size].view(dtype).view(*shape)


def touch_in_background(tensors: Sequence[Tensor], limit_bytes: int) -> threading.Thread:
    """Make the first pages of CPU tensors present, an equal share of `limit_bytes` of each.

    The first write to a page costs several times the second, and a request should not pay for it.
    A thread of the lowest priority does it; contents do not change, so others may write meanwhile.
    """
    thread = BackgroundThread(partial(_touch, tuple(tensors), limit_bytes), "llmc-touch")
    thread.start()
    return thread


def _touch(tensors: Sequence[Tensor], limit_bytes: int) -> None:
    madvise = _madvise()
    if madvise is None or not tensors:
        return
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
    share = limit_bytes // len(tensors)
    for offset in range(0, share, _HUGE_PAGE):  # the first blocks of all tensors come first
        for tensor in tensors:
            start, end = _whole_pages(tensor)
            size = min(_HUGE_PAGE, share - offset, end - start - offset) // _PAGE * _PAGE
            if size > 0 and madvise(
                ctypes.c_void_p(start + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
            ):
                return  # an older kernel: pages come as they are written
