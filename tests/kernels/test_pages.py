"""Memory for weights in huge pages, and memory that is given back."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmc.kernels.cpu.pages import HugePages, release_memory, touch_pages

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # madvise(2)


CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="huge pages are asked of Linux"
)


@needs_linux
@pytest.mark.parametrize("rows", [1024, 1500, 40_000])
def test_large_tensors_begin_with_a_huge_page(rows: int) -> None:
    tensor = HugePages(CPU).empty((rows, 1024), torch.bfloat16)
    assert tensor.shape == (rows, 1024) and tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous() and tensor.data_ptr() % _HUGE_PAGE == 0
    tensor.fill_(3)
    assert int(tensor.float().sum()) == 3 * rows * 1024


@needs_linux
def test_small_tensors_share_huge_pages() -> None:
    memory = HugePages(CPU)
    sizes = (100, 1, 5000, 262_144, 33)
    tensors = [memory.empty((2, size), torch.float32) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(t.max()) for t in tensors] == [int(t.min()) for t in tensors] == [0, 1, 2, 3, 4]
    assert tensors[0].data_ptr() % _HUGE_PAGE == 0
    for tensor, after in itertools.pairwise(tensors):
        assert 0 <= after.data_ptr() - tensor.data_ptr() - tensor.nbytes < 256
        assert after.data_ptr() % 64 == 0


@needs_linux
def test_tensors_of_many_threads_do_not_overlap() -> None:
    memory = HugePages(CPU)

    def fill(number: int) -> torch.Tensor:
        return memory.empty((100_000,), torch.int32).fill_(number)

    with ThreadPoolExecutor(8) as pool:  # 120 MB: several chunks
        tensors = list(pool.map(fill, range(300)))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_other_devices_are_left_alone() -> None:
    tensor = HugePages(torch.device("meta")).empty((1024, 4096), torch.bfloat16)
    assert tensor.device.type == "meta" and tensor.shape == (1024, 4096)


def test_scalars_and_empty_tensors_have_their_shapes() -> None:
    memory = HugePages(CPU)
    assert memory.empty((), torch.float32).shape == ()
    assert memory.empty((0, 3), torch.bfloat16).shape == (0, 3)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident pages are Linux's")
def test_touching_makes_pages_present_and_changes_nothing() -> None:
    size = 16 << 20
    maps = [mmap.mmap(-1, size) for _ in range(2)]  # fresh pages, whatever malloc would give again
    tensors = [torch.frombuffer(pages, dtype=torch.uint8) for pages in maps]
    tensors[0][:100] = 7
    if not _has_populate():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert list(touch_pages(tensors, limit_bytes=size)) == [True] * 8
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
