"""The Triton kernels compiled ahead of time for GPUs that are not there, within a committed budget.

triton_budget_3.6.json to _3.9.json hold what each build used of registers, spill space and shared
memory with that version of triton when it was last accepted; using more of any fails. After a
change that is worth its cost, write them anew, one with each version of triton, and commit them
with the change:

    LLMC_WRITE_TRITON_BUDGET=1 pytest -m "" tests/kernels/test_triton_aot.py

The one for CI's version also holds digests of what was compiled. While one is the same, most builds
are not repeated: Triton compiles the same source to the same code, and they took a seventh of CI's
time. One in REPEATED is compiled all the same, and must use exactly what it did then.

A wide sweep over flags and head sizes runs on demand: `pytest -m slow tests/kernels`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from tiers import tiered

triton = pytest.importorskip(
    "triton", reason="triton is not installed: its kernels cannot be compiled"
)
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: there is no compiler", allow_module_level=True)

from triton_aot import (  # noqa: E402
    OTHERS,
    SHARED_LIMIT,
    TARGETS,
    Use,
    compile_launch,
    compiled_code,
    is_for,
    machine_code,
    source_digest,
    variant,
)
from triton_builds import BUILDS, CLASSED, SIZED, attention, copied, named_launches, sweep  # noqa: E402

from llmc.kernels.triton import paged_attention  # noqa: E402
from llmc.kernels.triton.attention_kernel import load_tile  # noqa: E402
from llmc.kernels.triton.attention_tiles import TRITON_SPECIALIZES  # noqa: E402
from llmc.kernels.triton.launch import Launch  # noqa: E402

VERSION = ".".join(triton.__version__.split(".")[:2])
BUDGETS = sorted(Path(__file__).parent.glob("triton_budget_*.json"))
BUDGET = Path(__file__).with_name(f"triton_budget_{VERSION}.json")
WRITING = bool(os.environ.get("LLMC_WRITE_TRITON_BUDGET"))
# bytes (NVIDIA) or registers (AMD); wide float32 tiles pay this much, nothing else comes near
MAX_SPILLED = 128
REPEATED = 16


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile here and now; what a user's cache holds is neither used nor touched."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture(scope="module")
def budget() -> Iterator[dict[str, dict[str, Any]]]:
    lines = json.loads(BUDGET.read_text()) if BUDGET.exists() and not WRITING else {}
    yield lines
    if WRITING:
        text = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(lines.items()))
        BUDGET.write_text("{\n" + text + "\n}\n")


@pytest.mark.parametrize("target", tiered(TARGETS, "sm_90"))
@pytest.mark.parametrize("build", BUILDS)
def test_build_is_within_its_budget(
    build: str,
    target: str,
    budget: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if target.startswith("gfx"):  # as torch says it there
        monkeypatch.setattr(torch.version, "hip", "7.0")
    for kernel, launch in named_launches(BUILDS[build]()):
        if not is_for(launch, target):
            continue
        name = f"{build} | {kernel} | {target}"
        digest = source_digest(launch, target)
        same = budget.get(name, {}).get("source") == digest
        if same and crc32(name.encode()) % REPEATED:
            continue
        use = compile_launch(launch, target)
        assert use.shared <= SHARED_LIMIT[target]
        if WRITING:
            budget[name] = {**asdict(use), "source": digest}
        assert name in budget, f"{name} has no budget; the file's header says how to write one"
        allowed = _allowed(budget[name])
        assert use == allowed or not same, f"{name} uses {use}, and used {allowed} with this source"
        over = {k: v for k, v in asdict(use).items() if v > getattr(allowed, k)}
        assert not over, f"{name} uses {use}, the budget is {allowed}"


def _allowed(line: dict[str, Any]) -> Use:
    return Use(**{k: v for k, v in line.items() if k != "source"})


KERNEL = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2.0)

@triton.jit
def changed(x):
    return x {operator} FACTOR

@triton.jit
def kernel(x, COUNT: tl.constexpr):
    at = x + tl.arange(0, COUNT)
    tl.store(at, changed(tl.load(at)))
"""


def test_a_digest_is_that_of_what_is_compiled(tmp_path: Path) -> None:
    def launch(name: str, text: str) -> Launch:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        namespace = runpy.run_path(str(path))
        x = torch.empty(16, device="meta")
        return Launch(kernel=namespace["kernel"], grid=(1,), args={"x": x}, constants={"COUNT": 16})

    own = launch("own", KERNEL.format(operator="*"))
    digest = source_digest(own, "sm_90")
    known = launch("known", KERNEL.format(operator="*"))
    assert known.kernel.fn.__globals__["changed"].cache_key, "of a callee that was compiled before"
    assert digest == source_digest(known, "sm_90")
    assert digest == source_digest(launch("lower", "\n\n" + KERNEL.format(operator="*")), "sm_90")
    others = [
        source_digest(launch("callee", KERNEL.format(operator="+")), "sm_90"),
        source_digest(replace(own, constants={"COUNT": 32}), "sm_90"),
        source_digest(replace(own, args={"x": own.args["x"].half()}), "sm_90"),
        source_digest(replace(own, num_warps=8), "sm_90"),
        source_digest(replace(own, max_registers=64), "sm_90"),
        source_digest(own, "sm_100"),
    ]
    assert len({digest, *others}) == 7


@pytest.mark.parametrize("target", tiered(OTHERS, "gfx950"))
@pytest.mark.parametrize(
    "build",
    tiered(
        (
            "attention decode", "attention chosen", "choose_keys", "fused_linear few",
            "quantized_linear int4 few", "expert_linear few", "quantized_expert_linear mxfp4 few",
            "add_lora few", "delta_rule prompts", "encoder_attention",
        ),
        "attention decode", "fused_linear few",
    ),
)  # fmt: skip
def test_products_are_compiled_for_all_gpus_of_amd(
    build: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton refuses precisions that a GPU has no products for, whatever is multiplied."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for _, launch in named_launches(BUILDS[build]()):
        assert compile_launch(launch, target).shared <= SHARED_LIMIT[target]


SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 64, 100, 256)


@pytest.mark.parametrize("op", SIZED)
def test_one_compiled_kernel_serves_every_size(op: str) -> None:
    """A size of 1, or one that divides by 16, must not be compiled for anew."""
    plans = [SIZED[op](size) for size in SIZES]
    for launches in zip(*(plan.launches for plan in plans), strict=True):
        assert len({variant(launch) for launch in launches}) == 1


@pytest.mark.parametrize("op", CLASSED)
def test_one_compiled_kernel_serves_each_class_of_rows(op: str) -> None:
    launches = [launch for size in range(1, 101) for launch in CLASSED[op](size).launches]
    classes = {
        (launch.kernel.__name__, launch.num_warps, launch.num_stages, str(launch.constants))
        for launch in launches
    }
    assert len({variant(launch) for launch in launches}) == len(classes) <= 8


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
def test_chips_that_convert_float8_run_fewer_instructions(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instructions() -> int:
        launch = BUILDS["attention decode fp8_e4m3"]().launches[0]
        assert compile_launch(launch, target).spilled == 0
        return len(re.findall(r"/\*[0-9a-f]{4,}\*/", machine_code(compiled_code(launch, target))))

    by_bits = instructions()
    monkeypatch.setattr(paged_attention, "converts", lambda device: True)
    assert instructions() < 0.75 * by_bits


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("rows", ["few", "rows", "many"])
def test_experts_multiply_words_of_codes_as_they_are_stored(rows: str, target: str) -> None:
    """A thread's four codes go to shared memory together; no instruction of it widens them.

    Triton 3.7 writes a store of four bytes, which the assembler makes one of a word."""
    launch = BUILDS[f"quantized_expert_linear fp8 product, {rows}"]().launches[-1]
    compiled = compiled_code(launch, target)
    code = compiled.asm["ptx"]
    products = {"sm_90": r"wgmma\S+\.e4m3\.e4m3", "sm_100": r"tcgen05\.mma\S+kind::f8f6f4"}
    if rows == "few":  # too few for those
        assert re.search(r"mma\.sync\S+m16n8", code)
    else:
        assert re.search(products[target], code)
        assert "cvt.rn.f16x2.e4m3x2" not in code
    stores = re.findall(r"\bSTS\S*", machine_code(compiled))
    # on sm_100, one byte says that tensor memory was allocated
    assert len(stores) > 1 and stores.count("STS.U8") <= (target == "sm_100"), stores


# loads of what no earlier kernel of the step writes: query_start and context_len, and weights
BEFORE_THE_WAIT = {
    "attention decode": 0, "attention chosen": 0, "rope_write": 0, "write_kv": 0,
    "rope_attention": 4, "latent_query": 8, "head_product of latents": 8,
}  # fmt: skip


@pytest.mark.parametrize("build", BEFORE_THE_WAIT)
def test_nothing_of_an_earlier_kernel_is_read_before_the_wait(build: str) -> None:
    code = compiled_code(BUILDS[build]().launches[0], "sm_90").asm["ptx"]
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.wait" not in after
    assert "griddepcontrol.launch_dependents" in after
    early = re.findall(r"\bld\.global\S*", before)
    assert len(early) == BEFORE_THE_WAIT[build], early
    assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)


def test_keys_are_written_before_they_are_read() -> None:
    """All threads wait between the last store of this step's keys and the first load of a tile."""
    code = compiled_code(BUILDS["rope_attention"]().launches[0], "sm_90").asm["ptx"]
    stores, _, _ = code.partition("cp.async")
    _, last_store, between = stores.rpartition("st.global")
    assert last_store and "bar.sync" in between


def test_parts_are_published_before_they_are_counted() -> None:
    """All threads wait between storing a part and the addition that may let another program read
    it; what the last program reads comes from L2."""
    code = compiled_code(BUILDS["attention decode"]().launches[0], "sm_90").asm["ptx"]
    stores, atom, reads = code.partition("atom.global.gpu.acq_rel.add")
    _, last_store, between = stores.rpartition("st.global")
    assert atom and last_store and "bar.sync" in between
    loads = re.findall(r"\bld\.global\S*", reads)
    assert loads and all(".cg" in load for load in loads), loads


@pytest.mark.parametrize(
    "build", ["sum_expert_linear few", "sum_quantized_expert_linear fp8 product, few"]
)
def test_results_of_experts_are_published_before_they_are_counted(build: str) -> None:
    """The same, after sums and after the zeros of rows without an expert."""
    code = compiled_code(BUILDS[build]().launches[-1], "sm_90").asm["ptx"]
    *stores, reads = code.split("atom.global.gpu.acq_rel.add")
    assert len(stores) == 2
    for before in stores:
        _, last_store, between = before.rpartition("st.global")
        assert last_store and "bar.sync" in between
    assert reads.count("ld.global.cg") == 8, "choices"


COUNTED = (
    "attention decode", "fused_linear few", "quantized_linear int4 few", "route few",
    "sum_expert_linear few", "sum_quantized_expert_linear int4 few",
    "sum_quantized_expert_linear fp8 product, few", "conv_delta_rule", "conv_scan",
)  # fmt: skip


@pytest.mark.parametrize("build", COUNTED)
def test_all_threads_of_a_program_meet_before_it_is_counted(build: str) -> None:
    """The kernel itself asks for it, which machine code does not show: there, a barrier between two
    uses of shared memory can happen to be in the same place."""
    code = compiled_code(BUILDS[build]().launches[-1], "sm_90").asm["ttgir"]
    steps = re.findall(r"(?:tt\.(?:load|store|atomic_rmw add, \w+)|(?:gpu|ttg)\.barrier)\b", code)
    before = [first for first, then in pairwise(steps) if then.startswith("tt.atomic_rmw")]
    assert before and all(step.endswith(".barrier") for step in before), before


@pytest.mark.parametrize("build", ["conv_delta_rule", "conv_scan"])
def test_shared_channels_are_written_after_all_programs_have_read_them(build: str) -> None:
    """All threads wait between the last load of a convolution's state and the addition that lets
    another program overwrite it. The last program stores after that, besides the counter."""
    code = compiled_code(BUILDS[build]().launches[0], "sm_90").asm["ptx"]
    reads, atom, writes = code.partition("atom.global.gpu.acq_rel.add")
    _, last_load, between = reads.rpartition("ld.global")
    assert atom and last_load and "bar.sync" in between
    assert len(re.findall(r"\bst\.global", writes)) > 1


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_tiles_of_keys_can_be_copied_by_the_copy_engine(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = paged_attention.attention_config
    monkeypatch.setattr(
        paged_attention, "attention_config", lambda *args: replace(choose(*args), descriptors=True)
    )
    by_pointers, launch = (
        attention(4096, 4, 32, 8, 128, block_size=size).launches[0] for size in (16, 64)
    )
    assert launch.constants["DESCRIPTORS"] and not by_pointers.constants["DESCRIPTORS"]
    assert "cp.async.bulk.tensor" in compiled_code(launch, target).asm["ptx"]
    use = compile_launch(launch, target)
    assert use.spilled == 0 and use.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_warps_are_specialized_where_triton_can(target: str) -> None:
    """Each kind of warp asks for its own number of registers. Blackwell multiplies in tensor
    memory. Hopper gets the same kernel as without the option, and so does Blackwell with Triton 3.7
    (attention_tiles.py)."""
    launch = BUILDS["attention prefill specialized"]().launches[0]
    code = compiled_code(launch, target)
    if target == "sm_100" and TRITON_SPECIALIZES:
        assert "setmaxnreg.inc" in code.asm["ptx"] and "setmaxnreg.dec" in code.asm["ptx"]
        assert "tcgen05.mma" in code.asm["ptx"] and "cp.async.bulk.tensor" in code.asm["ptx"]
        assert code.metadata.num_warps > launch.num_warps
    else:
        without = compiled_code(BUILDS["attention prefill copied"]().launches[0], target)
        assert code.asm["ptx"] == without.asm["ptx"]
        assert "setmaxnreg" not in code.asm["ptx"]


@pytest.mark.parametrize(
    ("rows", "features"), [(64, {}), (4, {"distances": 1024})], ids=["decode", "distances"]
)
def test_warps_are_not_specialized_for_other_shapes(rows: int, features: dict[str, int]) -> None:
    tokens = 64 if rows == 64 else 4096
    (launch,) = copied(tokens, rows, 128, specialize=True, **features).launches
    assert not launch.constants["SPECIALIZE"]


def test_each_wave_of_an_amd_gpu_waits_for_its_stores() -> None:
    code = compiled_code(BUILDS["attention decode"]().launches[0], "gfx942").asm["amdgcn"]
    stores, atom, _ = code.partition("global_atomic_add")
    _, last_store, between = stores.rpartition("global_store")
    before, barrier, _ = between.partition("s_barrier")
    assert atom and last_store and barrier and "s_waitcnt vmcnt(0)" in before


@pytest.mark.parametrize(
    "build",
    tiered([name for name in BUILDS if name.startswith("rope_attention")], "rope_attention"),
)
def test_each_wave_of_an_amd_gpu_has_stored_its_keys_before_any_reads_them(build: str) -> None:
    """A program's waves share one L1, since it is not split over compute units."""
    code = compiled_code(BUILDS[build]().launches[0], "gfx942").asm["amdgcn"]
    assert ".amdhsa_tg_split 0" in code
    first_product, _, _ = code.partition("v_mfma")
    writes, *after = first_product.split(";;#ASMSTART\n\ts_waitcnt vmcnt(0)")
    assert len(after) == 1 and len(re.findall(r"_store_", writes)) >= 2  # keys and values
    waiting, barrier, reads = after[0].partition("s_barrier")
    assert barrier and not re.search(r"(global|buffer|flat)_(load|store)", waiting)
    lines, first = inspect.getsourcelines(load_tile.fn)
    tiles = range(first, first + len(lines))

    def loads_tiles(text: str) -> bool:
        """Whether an instruction that `load_tile` was compiled to reads memory."""
        line = 0
        for part in text.splitlines():
            if found := re.search(r"; (\w+\.py):(\d+):", part):
                line = int(found[2]) if found[1] == "attention_kernel.py" else 0
            elif line in tiles and re.search(r"(global|buffer|flat)_load", part):
                return True
        return False

    assert loads_tiles(reads) and not loads_tiles(writes)


@pytest.mark.parametrize(
    ("build", "loads"), [("fused_linear row", 2), ("fused_linear row gated", 4)]
)
def test_one_row_of_a_deep_weight_is_loaded_two_tiles_ahead(build: str, loads: int) -> None:
    """`loads` of each tile, among them x and the norm's weight: two tiles before the loop, and one
    in it, which waits until no more than the loads of one tile are left."""
    code = compiled_code(BUILDS[build]().launches[0], "sm_90").asm["ptx"]
    assert code.count("cp.async.commit_group") == 3 * loads
    first, *_ = re.findall(r"cp\.async\.wait_group\s+(\d+)", code)
    assert int(first) == loads


def test_only_linears_that_are_divided_allocate_memory_for_parts() -> None:
    """That of an output head would be hundreds of megabytes."""
    launches = [launch for plan in BUILDS.values() for _, launch in named_launches(plan())]
    linears = [launch for launch in launches if "SPLITS" in launch.constants]
    assert {launch.constants["SPLITS"] > 1 for launch in linears} == {True, False}
    for launch in linears:
        is_divided = launch.constants["SPLITS"] > 1
        assert (launch.args["partial"] is not None) == is_divided
        is_normed = launch.constants.get("NORM", False)
        assert (launch.args.get("squares") is not None) == (is_divided and is_normed)


def test_budgets_list_only_what_is_built(budget: dict[str, dict[str, Any]]) -> None:
    expected = {
        f"{build} | {kernel} | {target}"
        for build, plan in BUILDS.items()
        for kernel, launch in named_launches(plan())
        for target in TARGETS
        if is_for(launch, target)
    }
    listed = {path: json.loads(path.read_text()) for path in BUDGETS} | {BUDGET: budget}
    for path, lines in listed.items():
        assert set(lines) == expected, f"{path.name} is for other builds"


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
