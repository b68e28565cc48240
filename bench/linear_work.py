"""The linears timed by bench.kernels: few rows, quantized weights, routed experts.

Each is compared with torch's linear over the bfloat16 weight (cuBLAS on a GPU, oneDNN on a CPU),
plus the norm, activation or sum that our op fuses. Calls rotate through more weights than any cache
can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.kernel_work import CPU, InTurn, Work, fast
from llmc.kernels.quantized_linear import EXACT_BITS, Format, quantization_of, quantize

_COLD_BYTES = 2**28
_MAX_COPIES = 64
_BF16 = torch.bfloat16
Weight = TypeVar("Weight", Tensor, dict[str, Tensor])


def fused_work(rows: int, depth: int, channels: int, device: torch.device = CPU) -> Iterator[Work]:
    """The fused linears of a gated layer: norm, weight and gate; weight and residual sum."""
    yield linear_work(rows, depth, 2 * channels, device, normed=True, act="silu")
    yield linear_work(rows, channels, depth, device, added=True)


def linear_work(
    rows: int,
    depth: int,
    channels: int,
    device: torch.device = CPU,
    *,
    normed: bool = False,
    act: Literal["silu"] | None = None,
    added: bool = False,
) -> Work:
    """A linear with a norm before it, and an activation of half the channels or a residual sum
    after it."""
    x, residual = _rand(rows, depth, device=device), _rand(rows, channels, device=device)
    norm = _rand(depth, device=device) if normed else None
    weights = cold_copies(partial(_weight, channels, depth, device))
    fused = {"norm": normed, "silu": act, "residual": added}
    case = (None, norm, 1e-6 if normed else None, 0.0, act, residual if added else None)
    peer = partial(_by_torch, norm=norm, act=act, residual=residual if added else None)
    return Work(
        op="fused_linear",
        case=", ".join([f"{rows} x {depth} -> {channels}", *(n for n in fused if fused[n])]),
        run=InTurn([fast("fused_linear", (x, weight, *case)) for weight in weights]),
        peers={"linear": InTurn([partial(peer, x, weight) for weight in weights])},
        num_bytes=float(weights[0].nbytes),
        device=device,
    )


def low_bit_work(
    format: Format, rows: int, depth: int, channels: int, device: torch.device = CPU
) -> Work:
    """A quantized linear. Bytes are those of the weight; with many rows the limit is compute."""
    x = _rand(rows, depth, device=device)
    to = quantization_of(format, channels, depth)
    if to is None:
        raise ValueError(f"a weight of {channels} x {depth} can't be stored in {format}")
    weight, scale = quantize(_weight(channels, depth, device), to)
    size = weight.nbytes + scale.nbytes
    copies = cold_copies(weight.clone)
    plain = cold_copies(partial(_weight, channels, depth, device))
    many = rows > 64
    return Work(
        op="quantized_linear",
        case=f"{format}, {rows} x {depth} -> {channels}",
        run=InTurn([fast("quantized_linear", (x, w, scale, None, None)) for w in copies]),
        peers={"linear, bf16": InTurn([partial(F.linear, x, w) for w in plain])},
        num_bytes=0.0 if many else float(size),
        num_flops=2.0 * rows * depth * channels if many else 0.0,
        limit="bf16" if many else "read",
        device=device,
    )


def ways_work(
    format: Format, rows: int, depth: int, channels: int, device: torch.device
) -> Iterator[Work]:
    """The ways to multiply several rows on a GPU, one by one, whatever the op would choose.

    `wide_config` has the numbers of rows from which it dequantizes once, or multiplies inputs in
    fp8: those at which the rows here overtake `in tiles`.
    """
    from llmc.kernels.triton import dequantize, quantized_linear, scaled_linear

    x = _rand(rows, depth, device=device)
    to = quantization_of(format, channels, depth)
    if to is None:
        raise ValueError(f"a weight of {channels} x {depth} can't be stored in {format}")
    weight, scale = quantize(_weight(channels, depth, device), to)
    copies = cold_copies(weight.clone)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "in tiles": lambda w: quantized_linear.plan(x, w, scale, None, None).run(),
        "dequantized once": lambda w: dequantize.wide_linear(x, w, scale, None, None, None),
    }
    if format == "fp8" and scaled_linear.multiplies_codes(device):
        groups = scale.repeat_interleave(depth // 128, 1)
        ways["inputs in fp8"] = lambda w: scaled_linear.scaled_linear(x, w, scale, None)
        ways["inputs in fp8, groups"] = lambda w: scaled_linear.scaled_linear(x, w, groups, None)
    plain = cold_copies(partial(_weight, channels, depth, device))
    for name, way in ways.items():
        yield Work(
            op="quantized_linear",
            case=f"{format}, {rows} x {depth} -> {channels}, {name}",
            run=InTurn([partial(way, w) for w in copies]),
            peers={"linear, bf16": InTurn([partial(F.linear, x, w) for w in plain])},
            num_flops=2.0 * rows * depth * channels,
            limit="bf16",
            device=device,
        )


def embedding_work(
    format: Format, tokens: int, depth: int, vocab: int, device: torch.device = CPU
) -> Work:
    """A quantized embedding. Bytes are those of the selected rows and of the dequantized result."""
    to = quantization_of(format, vocab, depth)
    if to is None:
        raise ValueError(f"a weight of {vocab} x {depth} can't be stored in {format}")
    plain = _weight(vocab, depth, device)
    weight, scale = quantize(plain, to)
    draws = [torch.randint(0, vocab, (tokens,), device=device) for _ in range(_MAX_COPIES)]
    case = (weight, scale, None, None, _BF16)
    return Work(
        op="quantized_embedding",
        case=f"{format}, {tokens} of {vocab} x {depth}",
        run=InTurn([fast("quantized_embedding", (ids, *case)) for ids in draws]),
        peers={"embedding, bf16": InTurn([partial(F.embedding, ids, plain) for ids in draws])},
        num_bytes=tokens * ((weight.nbytes + scale.nbytes) / vocab + depth * _BF16.itemsize),
        device=device,
    )


def expert_work(
    rows: int,
    experts: int,
    top_k: int,
    depth: int,
    channels: int,
    device: torch.device = CPU,
) -> Work:
    """A routed layer's first linear; only the chosen experts' weights count as bytes."""
    weight = _rand(experts, channels, depth, device=device) * depth**-0.5
    picked = picked_experts(rows, experts, top_k, device)
    x = _rand(rows * top_k, depth, device=device)
    used = picked.unique()
    groups = [(int(e), (picked == e).nonzero()[:, 0]) for e in used.tolist()]
    out = torch.empty(rows * top_k, channels, dtype=_BF16, device=device)

    def loop() -> Tensor:
        for expert, where in groups:
            out[where] = F.linear(x[where], weight[expert])
        return out

    many = rows * top_k > 16 * experts
    return Work(
        op="expert_linear",
        case=f"{rows} rows, {top_k} of {experts} of {depth} -> {channels}",
        run=fast("expert_linear", (x, weight, None, picked, False)),
        peers={"linear, one by one": loop},
        num_bytes=0.0 if many else float(len(used) * channels * depth * _BF16.itemsize),
        num_flops=2.0 * rows * top_k * depth * channels if many else 0.0,
        limit="bf16" if many else "read",
        device=device,
    )


def low_bit_expert_work(
    format: Format,
    rows: int,
    experts: int,
    top_k: int,
    depth: int,
    channels: int,
    device: torch.device = CPU,
) -> Iterator[Work]:
    """A routed layer's first linear over quantized weights, for fp8 also with inputs in fp8.

    Compared with the same op over weights in bfloat16.
    """
    to = quantization_of(format, channels, depth)
    if to is None:
        raise ValueError(f"weights of {channels} x {depth} can't be stored in {format}")
    wide = _rand(experts, channels, depth, device=device) * depth**-0.5
    parts = [quantize(weight, to) for weight in wide]
    weight, scale = (torch.stack(part) for part in zip(*parts, strict=True))
    picked = picked_experts(rows, experts, top_k, device)
    x = _rand(rows, depth, device=device)
    many = rows * top_k > 16 * experts
    used = len(picked.unique())
    for bits in (EXACT_BITS, 8) if format == "fp8" else (EXACT_BITS,):
        yield Work(
            op="quantized_expert_linear",
            case=f"{format}, {rows} rows, {top_k} of {experts} of {depth} -> {channels}"
            + (", inputs in fp8" if bits == 8 else ""),
            run=fast("quantized_expert_linear", (x, weight, scale, None, None, picked, None, bits)),
            peers={"experts, bf16": fast("expert_linear", (x, wide, None, picked, False))},
            num_bytes=0.0 if many else used / experts * (weight.nbytes + scale.nbytes),
            num_flops=2.0 * rows * top_k * depth * channels if many else 0.0,
            limit="bf16" if many else "read",
            device=device,
        )


def picked_experts(rows: int, experts: int, top_k: int, device: torch.device) -> Tensor:
    """top_k different experts of each row, [rows * top_k]."""
    gen = torch.Generator().manual_seed(0)
    picks = torch.stack([torch.randperm(experts, generator=gen)[:top_k] for _ in range(rows)])
    return picks.flatten().to(device)


def _rand(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=_BF16, device=device)


def _weight(channels: int, depth: int, device: torch.device) -> Tensor:
    return _rand(channels, depth, device=device) * depth**-0.5


def cold_copies(make: Callable[[], Weight]) -> list[Weight]:
    """Enough copies that no cache can hold all of them."""
    first = make()
    num_bytes = sum(part.nbytes for part in tree_leaves(first))
    count = min(_MAX_COPIES, max(2, _COLD_BYTES // num_bytes))
    return [first, *(make() for _ in range(count - 1))]


def _by_torch(
    x: Tensor, weight: Tensor, norm: Tensor | None, act: str | None, residual: Tensor | None
) -> Tensor:
    if residual is not None:
        return torch.addmm(residual, x, weight.T)
    y = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, 1e-6), weight)
    if act is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up
