"""The counters of reductions inside a kernel: zeros whose addresses never change."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from llmc.kernels.triton import counters as module
from llmc.kernels.triton.counters import counters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_made", {})


def test_kernels_share_counters_and_growth_keeps_the_old_ones() -> None:
    first = counters(CPU, 3)
    assert first.dtype == torch.int32 and not first.any()
    assert counters(CPU, first.numel()) is first
    grown = counters(CPU, first.numel() + 1)
    assert grown.numel() == 2 * first.numel() and not grown.any()
    assert counters(CPU, 1) is grown
    assert module._made[CPU, 0][0] is first


def test_plans_for_absent_gpus_need_no_memory() -> None:
    assert counters(torch.device("meta"), 5).is_meta
    assert not module._made
