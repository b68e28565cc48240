"""What bench.tune looks for: shape classes that served models meet, and options to try there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bench.kernel_work import attention_case
from llmc.kernels.quantized_linear import Format, quantization_of, quantize
from llmc.kernels.triton.launch import Plan

Group = Mapping[str, tuple[int, ...]]
Run = Callable[[], Tensor]
_COLD_BYTES = 2**27  # weights take turns over more than the L2 cache holds
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`make(device)` gives a call of the kernel at sizes that stand for its class. All values of a
    group of options are combined; the next group starts from the best of the one before."""

    kernel: str
    make: Callable[[torch.device], Run]
    groups: tuple[Group, ...]


def attention(
    lengths: Sequence[tuple[int, int]],
    dim: int,
    device: torch.device,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    cache: torch.dtype | None = None,
) -> Run:
    from llmc.kernels.triton import paged_attention

    case = attention_case(list(lengths), heads, kv_heads, dim, _BF16, device)
    if cache is not None:
        one = torch.ones(1, device=device)
        case = (case[0], case[1].to(cache), case[2].to(cache), *case[3:], one, one)
    return lambda: paged_attention.plan(*case).run()


def few_rows(rows: int, depth: int, channels: int, device: torch.device, *, act: str = "") -> Run:
    from llmc.kernels.triton import fused_linear

    x = torch.randn(rows, depth, dtype=_BF16, device=device)
    weight = torch.randn(channels, depth, dtype=_BF16, device=device) * depth**-0.5
    plan = fused_linear.plan
    return _in_turn(
        [partial(plan, x, w, None, None, None, 0.0, act or None, None) for w in _copies(weight)]
    )


def low_bit(format: Format, rows: int, depth: int, channels: int, device: torch.device) -> Run:
    from llmc.kernels.triton import quantized_linear

    x = torch.randn(rows, depth, dtype=_BF16, device=device)
    to = quantization_of(format, channels, depth)
    assert to is not None
    weight, scale = quantize(torch.randn(channels, depth, device=device) * depth**-0.5, to)
    plan = quantized_linear.plan
    return _in_turn([partial(plan, x, w, scale, None, None) for w in _copies(weight)])


def experts(rows: int, count: int, depth: int, channels: int, device: torch.device) -> Run:
    from llmc.kernels.triton import expert_linear

    x = torch.randn(rows, depth, dtype=_BF16, device=device)
    weight = torch.randn(count, channels, depth, dtype=_BF16, device=device) * depth**-0.5
    picked = torch.randint(0, count, (rows,), device=device)
    return lambda: expert_linear.plan(x, weight, None, picked, False).run()


def _copies(weight: Tensor) -> list[Tensor]:
    """The same numbers at many places: results can be compared, and no cache holds them all."""
    return [weight, *(weight.clone() for _ in range(max(1, _COLD_BYTES // weight.nbytes)))]


def _in_turn(plans: Sequence[Callable[[], Plan[Tensor]]]) -> Run:
    turn = cycle(plans)
    return lambda: next(turn)().run()


_DECODE: tuple[Group, ...] = (
    {"block_n": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    {"waves": (2, 4, 8), "min_tiles": (2, 4, 8)},
)
_PROMPT: tuple[Group, ...] = (
    {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
)
_DRAFTS: tuple[Group, ...] = (
    {"block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
)
_ROW: tuple[Group, ...] = (
    {"block_n": (4, 8, 16, 32), "block_k": (256, 512, 1024), "num_warps": (2, 4, 8)},
    {"waves": (2, 4, 8)},
)
_ROWS: tuple[Group, ...] = (
    {"block_n": (16, 32, 64), "block_k": (64, 128, 256), "num_warps": (4, 8),
     "num_stages": (3, 5)},
    {"waves": (2, 4, 8)},
)  # fmt: skip
_LOW_ROW: tuple[Group, ...] = (
    {"block_n": (16, 32), "block_k": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)},
    {"waves": (2, 4, 8)},
)
_LOW_ROWS: tuple[Group, ...] = (
    {"block_n": (32, 64), "block_k": (64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    {"waves": (2, 4, 8)},
)
_MANY: tuple[Group, ...] = (
    {"block_m": (64, 128), "block_n": (64, 128, 256), "block_k": (32, 64), "num_warps": (4, 8),
     "num_stages": (3, 4)},
)  # fmt: skip
_EXPERTS: tuple[Group, ...] = (
    {"block_n": (32, 64, 128), "block_k": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4, 5)},
)

_FP8 = torch.float8_e4m3fn
# (depth, channels) of the linears of an 8B, a 1B and a 0.6B model; act where gate and up are one
_LINEARS = (
    (4096, 28672, "silu"), (14336, 4096, ""), (4096, 4096, ""), (4096, 6144, ""),
    (1024, 6144, "silu"), (3072, 1024, ""), (2048, 1024, ""), (1024, 4096, ""),
    (2048, 16384, "silu"), (8192, 2048, ""),
)  # fmt: skip

SEARCHES: tuple[Search, ...] = (
    Search(
        kernel="paged_attention",
        make=partial(attention, [(1, 4096)] * 64, 128),
        groups=_DECODE,
    ),
    Search(
        kernel="paged_attention",
        make=partial(attention, [(2048, 2048)] * 2, 128),
        groups=_PROMPT,
    ),
    *(
        Search(
            kernel="fused_linear",
            make=partial(few_rows, rows, depth, channels, act=act),
            groups=_ROW if rows == 1 else _ROWS,
        )
        for rows in (1, 8)
        for depth, channels, act in _LINEARS
    ),
    Search(kernel="paged_attention", make=partial(attention, [(1, 4096)] * 64, 64), groups=_DECODE),
    Search(
        kernel="paged_attention", make=partial(attention, [(2048, 2048)] * 2, 64), groups=_PROMPT
    ),
    Search(
        kernel="paged_attention",
        make=partial(attention, [(1, 4096)] * 64, 128, cache=_FP8),
        groups=_DECODE,
    ),
    Search(
        kernel="paged_attention", make=partial(attention, [(8, 4096)] * 32, 128), groups=_DRAFTS
    ),
    *(
        Search(
            kernel="quantized_linear",
            make=partial(low_bit, format, rows, 4096, 14336),
            groups=groups,
        )
        for format in ("int4", "fp8")
        for rows, groups in ((1, _LOW_ROW), (8, _LOW_ROWS), (2048, _MANY))
    ),
    *(
        Search(kernel="expert_linear", make=partial(experts, rows, 128, 2048, 768), groups=groups)
        for rows, groups in ((64, _EXPERTS), (32768, _MANY))
    ),
)
