"""Memory for weights: begins with a huge page, and is an ordinary tensor otherwise."""

from __future__ import annotations

import mmap
import sys

import psutil
import pytest
import torch

from llmc.kernels.cpu.pages import empty_in_huge_pages, touch_in_background

_HUGE_PAGE = 2 << 20


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
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    tensors[0][:100] = 7
    before = psutil.Process().memory_info().rss
    touch_in_background(tensors, limit_bytes=size).join(30)
    grown = psutil.Process().memory_info().rss - before
    if grown == 0:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert 0.8 * size < grown < 1.5 * size, "half of each was asked for"
    assert (tensors[0][:100] == 7).all()
