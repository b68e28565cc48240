"""The counters of reductions inside a kernel: zeros whose addresses never change."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("name", "expected"), [("gfx942:sramecc+:xnack-", True), ("gfx90a", True), ("gfx1100", False)]
)
def test_stores_are_ordered_by_a_barrier_on_cdna(
    name: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    assert module.orders_stores(CPU)
    monkeypatch.setattr(torch.version, "hip", None)
    assert module.orders_stores(device)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    module._is_cdna.cache_clear()
    properties = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert module.orders_stores(device) == expected
    module._is_cdna.cache_clear()
