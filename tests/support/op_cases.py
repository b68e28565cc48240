"""Shared by the op tests: cases with readable names, copies that keep strides, tolerances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.kernels import (  # noqa: F401
    act_mul,
    add_lora,
    attention,
    ban_words,
    bmm,
    causal_conv,
    choose_blocks,
    choose_experts,
    choose_keys,
    collectives,
    conv_recurrence,
    decayed_softmax,
    delta_rule,
    draft_states,
    encoder_attention,
    entries,
    fused_linear,
    fused_quantized_linear,
    gated_rms_norm,
    image_attention,
    latent_attention,
    layer_norm,
    linear_recurrence,
    paged_attention,
    place_rows,
    pool_tokens,
    pool_windows,
    prepare_step,
    process_logits,
    quantized_embedding,
    quantized_linear,
    record_tokens,
    rms_norm,
    rope_attention,
    rope_latent_attention,
    rope_write,
    rope_write_latent,
    route,
    running_max,
    sample,
    sample_rows,
    selective_scan,
    sum_expert_linear,
    token_logprobs,
    write_kv,
    write_segments,
)
from llmc.kernels.cache_dtype import FP8, block_tokens, row_scales
from llmc.kernels.cpu.build import load
from llmc.kernels.quantized_linear import EXACT_BITS
from llmc.kernels.registry import OPS, Case, Impl, Op

CPU = torch.device("cpu")
# Collectives are torch.distributed's (tests/kernels/test_collectives.py), and markers never run.
# Image ops and max pooling run in few steps, in torch.
COLLECTIVES = {"all_reduce", "all_gather", "first_rank", "embed_shard", "shard_ids"}
MARKERS = {"attention", "entries", "entry_attention", "pool_tokens", "draft_states"}
WITHOUT_KERNELS = {*MARKERS, "place_rows", "image_attention", "running_max", *COLLECTIVES}
# passes for GPUs alone insert them
FOR_GPUS = {
    *("route", "sort_experts"),
    *("fused_quantized_linear", "norm_add_quantized_linear"),
    *("sum_expert_linear", "sum_quantized_expert_linear"),
    *("sample_rows", "add_linear", "norm_add_linear", "conv_delta_rule", "conv_scan"),
    *("rope_attention", "rope_latent_attention"),
}
# torch's attention serves each text
WITHOUT_CPP = {*WITHOUT_KERNELS, *FOR_GPUS, "encoder_attention"}
WITHOUT_TRITON = {*WITHOUT_KERNELS, "bmm"}  # for GPUs, torch has it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {  # of results that are rounded once from float32
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}

_INF, _NAN = float("inf"), float("nan")
INT8_ROWS = (  # what an int8 cache has to store: ties, zeros, what is too small, what is not finite
    (127.0, 0.5, -1.5, 2.5),
    (-1e30, 1e30, 3e27, 0.0),
    (0.0, -0.0, 0.0, 0.0),
    (1e-38, 0.0, 0.0, -1e-38),
    (1.0, _INF, 0.0, 0.0),
    (_NAN, 1.0, 2.0, 3.0),
)


def cases(name: str, dtype: torch.dtype, device: torch.device = CPU) -> Iterator[Case]:
    for maker in OPS[name].case_makers:
        yield from maker(device, dtype)


@lru_cache(maxsize=1)
def all_cases(name: str, dtype: torch.dtype, device: torch.device = CPU) -> list[Case]:
    """The same, for tests that take one of them each, one after the other: it is not to be changed.
    Making an op's hundreds of cases anew for each of them would take longer than the tests."""
    return list(cases(name, dtype, device))


def rounds(name: str, case: Case) -> bool:
    """Whether inputs are rounded to integers, which only x86 kernels support."""
    names = (a.name for a in OPS[name].overload._schema.arguments)
    given = dict(zip(names, case, strict=False))
    if given.get("x_bits", EXACT_BITS) == EXACT_BITS:
        return False
    return bool(given["weight"].dtype != torch.float8_e4m3fn)


def has_fp8(case: Case) -> bool:
    """Whether caches are float8, which torch's own checks cannot compare."""
    return any(isinstance(x, Tensor) and x.dtype in FP8 for x in case)


def is_narrowed(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a cache in a narrower dtype than the inputs."""
    return is_int8_cache(x) or x.is_floating_point() and x.dtype.itemsize < dtype.itemsize


def is_int8_cache(x: Tensor) -> bool:
    return x.dtype == torch.int8 and x.dim() == 4


def case_params(names: list[str]) -> list[Any]:
    """pytest parameters (name, dtype, index) for every case of the ops."""
    return [
        pytest.param(name, dtype, i, id=f"{name}-{str(dtype)[6:]}-{i}")
        for name in names
        for dtype in DTYPES
        for i, _ in enumerate(cases(name, dtype))
    ]


def copy_case(case: Case) -> Case:
    """A copy with its own tensors and the same strides (views of a packed tensor stay strided)."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return out.copy_(x)

    return tuple(copy(x) for x in case)


def outputs(result: Any) -> list[Tensor]:
    """The tensors that an op returned."""
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


def effect(function: Any, case: Case) -> list[Tensor]:
    """A call's results, then its arguments (copies) after the call."""
    given = copy_case(case)
    return [*outputs(function(*given)), *(x for x in given if isinstance(x, Tensor))]


def assert_same_effect(reference: Any, implementation: Any, case: Case, dtype: torch.dtype) -> None:
    """Check that both give the same outputs, and leave the same values in every argument."""
    assert_same(effect(implementation, case), effect(reference, case), dtype)


def with_int8_caches(limit: dict[str, float], tensors: Iterable[Any]) -> dict[str, float]:
    """The limit, or that of attention to an int8 cache, if one is among the tensors: the CPU's
    kernels round queries and weights to 16 bits."""
    if not any(isinstance(x, Tensor) and is_int8_cache(x) for x in tensors):
        return limit
    return {name: max(number, 1e-4) for name, number in limit.items()}


def assert_same(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    limit = with_int8_caches(TOLERANCE[dtype], expected)
    for want, got in zip(expected, actual, strict=True):
        if is_narrowed(want, dtype):
            assert_same_codes(got, want)
        else:
            torch.testing.assert_close(got, want, equal_nan=True, **limit)


def assert_same_codes(got: Tensor, want: Tensor) -> None:
    """Values in a narrower dtype than the inputs: equal, except for a few that round to a neighbor
    because of the last bit."""
    assert got.dtype == want.dtype
    if want.dtype == torch.int8:
        tokens = block_tokens(want)
        different = (got[:, :, :tokens].int() - want[:, :, :tokens].int()).abs()
        assert int(different.max()) <= 1
        assert int(different.count_nonzero()) <= 0.005 * different.numel()
        torch.testing.assert_close(
            row_scales(got), row_scales(want), rtol=2e-6, atol=0, equal_nan=True
        )
        return
    bits = torch.uint8 if want.dtype.itemsize == 1 else torch.int16
    unequal = (got.view(bits) != want.view(bits)) & ~(got.isnan() & want.isnan())
    assert int(unequal.sum()) <= 0.005 * unequal.numel()
    step = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=step, atol=1e-6, equal_nan=True)


def assert_same_schema(op: Op, impl: Impl) -> None:
    """Check that names, types, defaults, mutated arguments and results match the reference."""

    def described(schema: Any) -> tuple[list[Any], list[str]]:
        return [
            (
                a.name,
                str(a.type),
                a.default_value,
                a.alias_info is not None and a.alias_info.is_write,
            )
            for a in schema.arguments
        ], [str(r.type) for r in schema.returns]

    assert described(impl.op()._schema) == described(op.overload._schema)


def require_cpu_ops() -> None:
    """Skip, with the reason, if the C++ ops can't be built."""
    if not load():
        pytest.skip("no C++ compiler builds the CPU ops here (see the warning of kernels.cpu)")
