"""bench.tune under Triton's interpreter: options reach the kernels, wrong ones are found out.

Times mean nothing here; that a search ends with options that compute the same is what is tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import bench_package  # noqa: F401 - makes `bench` importable
import pytest
import torch

from bench import tune, tune_searches
from bench.clock import Timing
from bench.tune_searches import SEARCHES, Search, attention, experts, few_rows, low_bit
from llmc.kernels.triton import fused_linear, paged_attention, quantized_linear
from llmc.kernels.triton.launch import Plan

CPU = torch.device("cpu")


def once(run: Callable[[], object], device: torch.device, *, budget_s: float = 0) -> Timing:
    start = time.perf_counter()
    run()
    return Timing(seconds=time.perf_counter() - start, how="calls")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged_attention, fused_linear, quantized_linear):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(tune_searches, "_COLD_BYTES", 0)
    monkeypatch.setattr(tune, "time_call", once)


TINY = {
    "attention": Search(
        kernel="paged_attention",
        make=partial(attention, [(1, 70)], 32, heads=4, kv_heads=2),
        groups=({"block_n": (16, 32)}, {"waves": (1, 4), "min_tiles": (1,)}),
    ),
    "row": Search(
        kernel="fused_linear",
        make=partial(few_rows, 1, 96, 64, act="silu"),
        groups=({"block_n": (4, 8), "block_k": (32, 64)},),
    ),
    "rows": Search(
        kernel="fused_linear", make=partial(few_rows, 3, 96, 64), groups=({"block_n": (16, 32)},)
    ),
    "low bits": Search(
        kernel="quantized_linear",
        make=partial(low_bit, "int4", 2, 128, 32),
        groups=({"block_k": (64, 128)}, {"waves": (1, 8)}),
    ),
    "experts": Search(
        kernel="expert_linear",
        make=partial(experts, 5, 3, 32, 48),
        groups=({"block_n": (16, 64)},),
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_every_candidate_computes_the_same(name: str) -> None:
    search = TINY[name]
    found = tune.search_one(search, CPU, None)
    assert found.key[:2] == ("", search.kernel)
    assert found.tried == sum(len(group) for group in tune.candidates(search))
    assert found.failed == ()
    assert found.ms > 0 and found.default_ms > 0


def test_options_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    search = TINY["row"]
    run = search.make(CPU)
    seen = []
    whole = Plan.run

    def kept(plan: Plan[torch.Tensor]) -> torch.Tensor:
        seen.append(plan.launches[0].constants)
        return whole(plan)

    monkeypatch.setattr(Plan, "run", kept)
    key = tune.asked_for(search, run)
    tune.with_options(key, {"block_n": 4, "block_k": 32}, run)
    tune.with_options(("", "fused_linear", "another shape"), {"block_n": 4}, run)
    assert [(c["BLOCK_N"], c["BLOCK_K"]) for c in seen[1:]] == [
        (4, 32),
        (seen[0]["BLOCK_N"], seen[0]["BLOCK_K"]),
    ]


def test_a_wrong_result_or_option_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(
        kernel="fused_linear", make=TINY["rows"].make, groups=({"block_n": (16, 24, 32)},)
    )
    honest = tune.with_options

    def wrong(
        key: tune.Key, options: tune.Options, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        got = honest(key, options, run)
        return got + 1 if options.get("block_n") == 16 else got

    monkeypatch.setattr(tune, "with_options", wrong)
    found = tune.search_one(search, CPU, None)
    assert len(found.failed) == 2 and found.tried == 3
    assert "another result" in found.failed[0] and "16" in found.failed[0]
    assert "24" in found.failed[1], "no power of two"
    assert found.options in (None, {"block_n": 32})


def test_every_search_is_about_a_class_of_its_own() -> None:
    """Shapes are only written down: on a CPU of a few gigabytes most are too large to run."""
    assert len(SEARCHES) > 25
    for search in SEARCHES:
        for group in tune.candidates(search):
            assert 3 <= len(group) <= 48
