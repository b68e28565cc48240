"""Huge pages for large tensors: streaming weights is faster with fewer TLB misses.

Linux provides them on request if /sys/kernel/mm/transparent_hugepage/enabled is `madvise` (the
usual setting). Elsewhere, requests have no effect.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_MADV_DONTNEED = 4  # madvise(2): frees the pages, which then read as zeros
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # faults pages in without changing them; since Linux 5.14
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_LEAST_BYTES = 2 * _HUGE_PAGE  # a smaller tensor may not contain a whole huge page
_CHUNK = 16 * _HUGE_PAGE  # bytes that small weights share
_ALIGNMENT = 256  # bytes


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """The address range of the pages that are entirely in the tensor's memory."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Request huge pages for a CPU tensor's memory, before it is first written; returns it."""
    is_large = tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_BYTES
    if is_large and (madvise := _madvise()):
        start, end = _whole_pages(tensor)
        # A failure (the system has no huge pages) has no effect.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


def release_memory(tensors: Sequence[Tensor]) -> int:
    """Return the memory of CPU tensors to the system. Returns bytes, 0 if that is not possible.

    The tensors keep their addresses, with undefined contents; pages that are written again use
    memory again. Memory that the allocator keeps for reuse is returned too.
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
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return given


class HugePages:
    """Allocates the weights of a model on `device`; on CPU, they are in huge pages.

    A tensor of a few MB, or the end of a large one, does not fill a huge page. So tensors of up to
    half of a chunk follow each other in chunks, which are freed when none of their tensors is left.
    Unused memory of a chunk is never touched, so it uses address space but no memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last chunk
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Like `torch.empty`. Several threads can call it."""
        size = math.prod(shape) * dtype.itemsize
        if self.device.type != "cpu" or size == 0 or _madvise() is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        memory = self._of_chunk(size) if size <= _CHUNK // 2 else _aligned(size)[:size]
        return memory.view(dtype).view(tuple(shape))

    def _of_chunk(self, size: int) -> Tensor:
        step = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if len(self._chunk) < step:
                self._chunk = _aligned(_CHUNK)
            memory, self._chunk = self._chunk[:size], self._chunk[step:]
        return memory


def _aligned(size: int) -> Tensor:
    """Bytes that begin with a huge page."""
    room = advise_huge_pages(torch.empty(size + _HUGE_PAGE, dtype=torch.uint8))
    start = -room.data_ptr() % _HUGE_PAGE
    return room[start : start + size]


def touch_pages(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[bool]:
    """Make the first pages of CPU tensors present, an equal share of `limit_bytes` for each.

    The first write to a page is several times slower than the second, and requests should not pay
    for it. Contents do not change. Each iteration yields True after about a millisecond: meanwhile
    the process holds a lock of its memory that allocations in other threads wait for.
    """
    madvise = _madvise()
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if madvise is None or not tensors:
        return
    share = limit_bytes // len(tensors)
    for offset in range(0, share, _HUGE_PAGE):  # the first blocks of all tensors come first
        for tensor in tensors:
            start, end = _whole_pages(tensor)
            size = min(_HUGE_PAGE, share - offset, end - start - offset) // _PAGE * _PAGE
            if size <= 0:
                continue
            at = ctypes.c_void_p(start + offset)
            if madvise(at, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return  # an older Linux: pages are faulted in when they are written
            yield True
