"""The Triton kernels compiled ahead of time for GPUs that are not there, within a committed budget.

triton_budget.json holds what each build used of registers, spill space and shared memory when it
was last accepted; using more of any fails. After a change that is worth its cost, write it anew and
commit it with the change:

    LLMC_WRITE_TRITON_BUDGET=1 pytest tests/kernels/test_triton_aot.py

A wide sweep over flags and head sizes runs on demand: `pytest -m slow tests/kernels`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from tiers import tiered

triton = pytest.importorskip(
    "triton", reason="triton is not installed: its kernels cannot be compiled"
)
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: there is no compiler", allow_module_level=True)

from triton_aot import SHARED_LIMIT, TARGETS, Use, compile_launch, is_for, variant  # noqa: E402
from triton_builds import BUILDS, SIZED, attention, named_launches, sweep  # noqa: E402

from llmc.kernels.triton import paged_attention  # noqa: E402

BUDGET = Path(__file__).with_name("triton_budget.json")
WRITING = bool(os.environ.get("LLMC_WRITE_TRITON_BUDGET"))
# bytes (NVIDIA) or registers (AMD); wide float32 tiles pay this much, nothing else comes near
MAX_SPILLED = 128


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile here and now; what a user's cache holds is neither used nor touched."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture(scope="module")
def budget() -> Iterator[dict[str, dict[str, int]]]:
    lines = {} if WRITING else json.loads(BUDGET.read_text())
    yield lines
    if WRITING:
        text = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(lines.items()))
        BUDGET.write_text("{\n" + text + "\n}\n")


@pytest.mark.parametrize("target", tiered(TARGETS, "sm_90"))
@pytest.mark.parametrize("build", BUILDS)
def test_build_is_within_its_budget(
    build: str, target: str, budget: dict[str, dict[str, int]]
) -> None:
    for kernel, launch in named_launches(BUILDS[build]()):
        if not is_for(launch, target):
            continue
        use = compile_launch(launch, target)
        assert use.shared <= SHARED_LIMIT[target]
        name = f"{build} | {kernel} | {target}"
        if WRITING:
            budget[name] = asdict(use)
        assert name in budget, f"{name} has no budget; the file's header says how to write one"
        allowed = Use(**budget[name])
        over = {k: v for k, v in asdict(use).items() if v > getattr(allowed, k)}
        assert not over, f"{name} uses {use}, the budget is {allowed}"


SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 64, 100, 256)


@pytest.mark.parametrize("op", SIZED)
def test_one_compiled_kernel_serves_every_size(op: str) -> None:
    """A size of 1, or one that divides by 16, must not be compiled for anew."""
    plans = [SIZED[op](size) for size in SIZES]
    for launches in zip(*(plan.launches for plan in plans), strict=True):
        assert len({variant(launch) for launch in launches}) == 1


def test_attention_is_compiled_once_for_each_class_of_sizes() -> None:
    shapes = [(tokens, rows) for rows in SIZES for tokens in (rows, rows + 1, 16 * rows)]
    launches = [
        launch
        for tokens, rows in shapes
        for blocks in (64, 100, 1024)
        for launch in attention(tokens, rows, 32, 8, 128, max_blocks=blocks).launches
    ]
    classes = {
        (launch.kernel.__name__, launch.num_warps, str(launch.constants)) for launch in launches
    }
    assert len({variant(launch) for launch in launches}) == len(classes)
    assert len(classes) < len(launches) / 10


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_chips_that_convert_float8_use_fewer_registers(
    target: str, budget: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "converts", lambda device: True)
    launch = BUILDS["attention decode fp8_e4m3"]().launches[0]
    use = compile_launch(launch, target)
    by_bits = budget[f"attention decode fp8_e4m3 | attention_kernel | {target}"]
    assert use.spilled == 0 and use.registers < by_bits["registers"]


def test_budget_lists_only_what_is_built(budget: dict[str, dict[str, int]]) -> None:
    expected = {
        f"{build} | {kernel} | {target}"
        for build, plan in BUILDS.items()
        for kernel, launch in named_launches(plan())
        for target in TARGETS
        if is_for(launch, target)
    }
    assert set(budget) == expected


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_sweep_compiles_and_fits(target: str, pytestconfig: pytest.Config) -> None:
    if "slow" not in pytestconfig.option.markexpr:
        pytest.skip("a sweep of minutes over flags and head sizes: ask for it with -m slow")
    over = []
    for build, plan in sweep():
        for kernel, launch in named_launches(plan()):
            use = compile_launch(launch, target)
            if use.shared > SHARED_LIMIT[target] or use.spilled > MAX_SPILLED:
                over.append(f"{build} | {kernel}: {use}")
    assert not over, "\n".join(over)
