"""Memory for weights: begins with a huge page, and is an ordinary tensor otherwise."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from llmc.kernels.cpu.pages import empty_in_huge_pages, release_memory, touch_in_background

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # madvise(2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked of Linux")
@pytest.mark.parametrize("rows", [1024, 1500, 4096])
def test_large_tensors_begin_with_a_huge_page(rows: int) -> None:
    tensor = empty_in_huge_pages((rows, 1024), torch.bfloat16)
    assert tensor.shape == (rows, 1024) and tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous() and tensor.data_ptr() % _HUGE_PAGE == 0
    tensor.fill_(3)
    assert int(tensor.float().sum()) == 3 * rows * 1024


def test_small_tensors_take_no_room_for_alignment() -> None:
    tensor = empty_in_huge_pages((100, 10), torch.float32)
    assert tensor.shape == (100, 10)
    assert tensor.untyped_storage().nbytes() == 4000 < mmap.PAGESIZE


def test_other_devices_are_left_alone() -> None:
    tensor = empty_in_huge_pages((1024, 4096), torch.bfloat16, "meta")
    assert tensor.device.type == "meta" and tensor.shape == (1024, 4096)


def test_a_scalar_has_a_shape_too() -> None:
    assert empty_in_huge_pages((), torch.float32).shape == ()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident pages are Linux's")
def test_touching_makes_pages_present_and_changes_nothing() -> None:
    size = 16 << 20
    maps = [mmap.mmap(-1, size) for _ in range(2)]  # fresh pages, whatever malloc would give again
    tensors = [torch.frombuffer(pages, dtype=torch.uint8) for pages in maps]
    tensors[0][:100] = 7
    if not _has_populate():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    touch_in_background(tensors, limit_bytes=size).join(60)
    half = size // mmap.PAGESIZE // 2
    assert [_resident_pages(tensor) for tensor in tensors] == [half, half]
    assert (tensors[0][:100] == 7).all()


def _has_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _resident_pages(tensor: torch.Tensor) -> int:
    """By mincore(2)."""
    flags = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, size, flags) == 0
    return sum(flag & 1 for flag in flags)


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_memory_is_given_back_and_can_be_written_again() -> None:
    tensor = torch.full((64 << 20,), 7, dtype=torch.uint8)
    address = tensor.data_ptr()
    assert release_memory([tensor]) > 63 << 20
    # pages that the system took back are zeros; all but the first and the last are whole
    assert int((tensor != 0).sum()) <= 2 * mmap.PAGESIZE
    assert tensor.data_ptr() == address
    tensor.fill_(9)
    assert bool((tensor == 9).all())


def test_small_tensors_have_nothing_to_give_back() -> None:
    tensor = torch.full((100,), 7, dtype=torch.uint8)
    assert release_memory([tensor]) == 0
    assert bool((tensor == 7).all())
