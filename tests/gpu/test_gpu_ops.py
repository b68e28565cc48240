"""Every Triton op on a GPU against its reference there: all registered cases, three dtypes.

New memory is filled with NaN while an op runs, so an element that it forgets to write fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import op_cases
import pytest
import torch
from gpu import DEVICE, DRY_RUN, needs_gpu
from torch import Tensor

from llmc.kernels.paged_attention import make_case
from llmc.kernels.quantized_linear import EXACT_BITS, Format, Quantization, quantize
from llmc.kernels.registry import OPS, Impl

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")
import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.triton import paged_attention as triton_attention

pytestmark = needs_gpu
WANTED = ("cpu", "torch") if DRY_RUN else ("triton",)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = sorted(name for name, op in OPS.items() if any(i.name == "triton" for i in op.impls))


def params() -> list[Any]:
    """Cases are counted on the CPU, where collecting them needs no GPU."""
    return [
        pytest.param(name, dtype, i, id=f"{name}-{str(dtype)[6:]}-{i}")
        for name in NAMES
        for dtype in TOLERANCE
        for i, case in enumerate(op_cases.cases(name, dtype))
        if not op_cases.rounds(name, case)
    ]


def version(name: str) -> Impl:
    found = next((i for wanted in WANTED for i in OPS[name].impls if i.name == wanted), None)
    if found is None and DRY_RUN:
        pytest.skip(f"no version of {name} can stand in")
    assert found is not None
    return found


@contextmanager
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "dtype", "index"), params())
def test_op_equals_its_reference_dry_run(name: str, dtype: torch.dtype, index: int) -> None:
    if DRY_RUN:
        op_cases.require_cpu_ops()
    case = op_cases.all_cases(name, dtype, DEVICE)[index]
    want_case, got_case = op_cases.copy_case(case), op_cases.copy_case(case)
    impl = version(name)
    if DRY_RUN and not impl.supports(**OPS[name].bind(got_case)):
        pytest.skip(f"the CPU stands in, and its {name} takes no {dtype}")
    assert impl.available() and impl.supports(**OPS[name].bind(got_case))
    want = op_cases.outputs(OPS[name].reference(*want_case))
    with poisoned_memory():
        got = op_cases.outputs(impl.op()(*got_case))
    want += [x for x in want_case if isinstance(x, Tensor)]
    got += [x for x in got_case if isinstance(x, Tensor)]
    limit = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    if DRY_RUN:
        limit = op_cases.with_int8_caches(limit, want)
    for expected, actual in zip(want, got, strict=True):
        assert actual.device.type == DEVICE.type
        if op_cases.is_narrowed(expected, dtype):
            op_cases.assert_same_codes(actual, expected)
        else:
            torch.testing.assert_close(actual, expected, equal_nan=True, **limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("format", "group", "x_bits"),
    [
        ("int4", 128, EXACT_BITS),
        ("int8", 0, EXACT_BITS),
        ("fp8", 0, EXACT_BITS),
        ("fp8", 0, 8),
        ("fp8", 128, 8),
        ("fp8", 32, 8),
    ],
)
@pytest.mark.parametrize("rows", [100, 130, 300])
def test_many_rows_by_quantized_weights_dry_run(
    rows: int, format: Format, group: int, x_bits: int, dtype: torch.dtype
) -> None:
    """In tiles, in fp8, and by the library."""
    if DRY_RUN:
        op_cases.require_cpu_ops()
    gen = torch.Generator().manual_seed(0)
    n, k = 1040, 1152
    weight, scale = quantize(
        torch.randn(n, k, generator=gen) * k**-0.5, Quantization(format=format, group=group)
    )
    bias, x = torch.randn(n, generator=gen), torch.randn(2, rows // 2, k, generator=gen)
    case = (
        x.to(DEVICE, dtype), weight.to(DEVICE), scale.to(DEVICE), None, bias.to(DEVICE, dtype),
        None, x_bits,
    )  # fmt: skip
    want = OPS["quantized_linear"].reference(*case)
    with poisoned_memory():
        got = version("quantized_linear").op()(*case)
        again = version("quantized_linear").op()(*case)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    ("format", "group", "x_bits"),
    [("int4", 128, EXACT_BITS), ("fp8", 128, EXACT_BITS), ("fp8", 128, 8), ("fp8", 0, 8)],
)
@pytest.mark.parametrize("rows", [24, 200, 2400])
def test_quantized_experts_dry_run(rows: int, format: Format, group: int, x_bits: int) -> None:
    """In tiles of every size, sorted or not, with rows that have no expert."""
    if DRY_RUN:
        op_cases.require_cpu_ops()
    gen = torch.Generator().manual_seed(0)
    n, k, experts = 272, 384, 4
    to = Quantization(format=format, group=group)
    drawn = torch.randn(experts * n, k, generator=gen) * k**-0.5
    weight, scale = (part.unflatten(0, (experts, -1)) for part in quantize(drawn, to))
    bias = torch.randn(experts, n, generator=gen).to(DEVICE, torch.bfloat16)
    x = torch.randn(rows // 2, k, generator=gen).to(DEVICE, torch.bfloat16)
    expert = torch.randint(-1, experts + 1, (rows,), generator=gen).to(DEVICE)
    case = x, weight.to(DEVICE), scale.to(DEVICE), None, bias, expert, None, x_bits
    want = OPS["quantized_expert_linear"].reference(*case)
    with poisoned_memory():
        got = version("quantized_expert_linear").op()(*case)
        again = version("quantized_expert_linear").op()(*case)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert torch.equal(got, again)


@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_keys_by_the_copy_engine_dry_run(
    dim: int, specialize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options that are off until measured; a GPU without them takes the usual way."""
    if DRY_RUN:
        op_cases.require_cpu_ops()
    choose = triton_attention.attention_config
    options = {"descriptors": True, "warp_specialize": specialize}
    monkeypatch.setattr(
        triton_attention, "attention_config", lambda *given: replace(choose(*given), **options)
    )
    lengths = [(300, 300), (1, 1), (77, 1000), (513, 600)]
    case = make_case(lengths, 8, 2, dim, dim, 64, DEVICE, torch.bfloat16)
    want = OPS["paged_attention"].reference(*case)
    with poisoned_memory():
        got = version("paged_attention").op()(*case)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_there_are_ops_to_test_dry_run() -> None:
    assert {"paged_attention", "sample", "prepare_step", "rope_write", "rope_attention"} <= set(
        NAMES
    )
