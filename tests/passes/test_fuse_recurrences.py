"""fuse_recurrences: what surrounds a recurrent op becomes its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, step, trace, weight
from torch import Tensor

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.selective_scan import selective_scan
from llmc.passes.base import histogram
from llmc.passes.edit import arguments, calls, val
from llmc.passes.fuse_recurrences import fuse_recurrences

GEN = torch.Generator().manual_seed(0)
TOKENS, HEADS, DIM = 5, 4, 6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GEN)


def fused(fn: Callable[..., Any], op: Any, left: set[str], **inputs: Arg) -> Any:
    """The arguments of the op after the pass, which leaves only `left` besides it and reshapes."""
    gm = trace(fn, **inputs)
    after, _ = apply(gm, fuse_recurrences())
    (node,) = calls(after.graph, op.overload)
    moves = ("view", "reshape", "aten.select", "squeeze", "transpose", "sym_size", "numpy_T")
    names = {n for n in histogram(after) if not any(m in n for m in moves)}
    assert names == {f"llmc.{op.name}.default", *left}
    bf16 = any(a.tensor.dtype == torch.bfloat16 for a in inputs.values())
    assert_same(after, gm, Values.of(**inputs), 4e-2 if bf16 else 1e-5)
    assert_idempotent(gm, fuse_recurrences())
    return arguments(node)


@DTYPES
def test_a_convolution_takes_its_activation(dtype: torch.dtype) -> None:
    def conv(x: Tensor, w: Tensor) -> Tensor:
        out = causal_conv.overload(x[0].T, w, *[None] * 8)
        return F.silu(out.T[None]).transpose(1, 2)

    x = step(rand(1, 3, TOKENS).to(dtype), dynamic=2)
    assert fused(conv, causal_conv, set(), x=x, w=weight("w", rand(3, 4).to(dtype))).act == "silu"


@DTYPES
@pytest.mark.parametrize("turned", [True, False], ids=["[C, T]", "[T, C]"])
def test_a_convolution_takes_the_gates_of_its_inputs_and_of_its_result(
    turned: bool, dtype: torch.dtype
) -> None:
    def conv(parts: Tensor, w: Tensor) -> Tensor:
        before, after, x = parts.chunk(3, dim=-1)
        if turned:
            before, after, x = (part.transpose(1, 2) for part in (before, after, x))
            out = causal_conv.overload((before * x)[0].T, w, *[None] * 8).T[None]
        else:
            out = causal_conv.overload((before * x)[0], w, *[None] * 8)[None]
        return after * out

    parts = step(rand(1, TOKENS, 9).to(dtype), dynamic=1)
    inputs = {"parts": parts, "w": weight("w", rand(3, 4).to(dtype))}
    given = fused(
        conv, causal_conv, {"aten.chunk.default", "<built-in function getitem>"}, **inputs
    )
    assert [tuple(val(v).shape)[1] for v in (given.x, given.x_gate, given.y_gate)] == [3, 3, 3]


@pytest.mark.parametrize(
    "around",
    [
        lambda conv, x, gate: conv(x * gate[0]),  # one for all tokens
        lambda conv, x, gate: conv(x) * gate[:, :1],  # one for all channels
        lambda conv, x, gate: conv(x)[:, None] * gate[None],  # of every other token
        lambda conv, x, gate: (y := conv(x)) * y.cumsum(1),  # made of the result
        lambda conv, x, gate: [conv(product := x * gate), product],
        lambda conv, x, gate: [(y := conv(x)) * gate, y],
        lambda conv, x, gate: conv(x) * gate.double(),
    ],
    ids=["a row", "a column", "all pairs", "its own result", "read twice", "read as it is", "wide"],
)  # fmt: skip
def test_other_products_around_a_convolution_stay(around: Callable[..., Any]) -> None:
    def layer(x: Tensor, gate: Tensor, w: Tensor) -> Any:
        return around(lambda v: causal_conv.overload(v, w, *[None] * 8), x, gate)

    inputs = {
        "x": step(rand(TOKENS, 3)), "gate": step(rand(TOKENS, 3)), "w": weight("w", rand(3, 4)),
    }  # fmt: skip
    _, (report,) = apply(trace(layer, **inputs), fuse_recurrences())
    assert not report.changed


def test_a_convolution_that_is_also_read_without_its_activation_stays() -> None:
    def conv(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = causal_conv.overload(x, w, *[None] * 8)
        return F.silu(out), out

    gm = trace(conv, x=step(rand(TOKENS, 3)), w=weight("w", rand(3, 4)))
    _, (report,) = apply(gm, fuse_recurrences())
    assert not report.changed


def delta(decay: Tensor, beta: Tensor, x: Tensor) -> Tensor:
    """With decay [1, T, H] or [1, T, H, D]."""
    decay = decay[0] if decay.dim() == 4 else decay[0][..., None]
    given = (x[0], x[0], x[0], decay, beta[0], 0.5, 1e-6, None, None, None)
    return delta_rule.overload(*given, *[None] * 4)[None]


def gates(dtype: torch.dtype, decays: int) -> dict[str, Arg]:
    return {
        "x": step(rand(1, TOKENS, HEADS, DIM).to(dtype), dynamic=1),
        "a": step(rand(1, TOKENS, HEADS * decays).to(dtype), dynamic=1),
        "b": step(rand(1, TOKENS, HEADS).to(dtype), dynamic=1),
        "rate": weight("rate", -rand(HEADS).exp()),
        "bias": weight("bias", rand(HEADS * decays).to(dtype)),
    }


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_delta_rule_takes_gates_per_head(scale: float, dtype: torch.dtype) -> None:
    def layer(x: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        beta = b.sigmoid() if scale == 1 else b.sigmoid() * scale
        return delta(rate * F.softplus(a.float() + bias), beta, x)

    given = fused(layer, delta_rule, set(), **gates(dtype, 1))
    assert given.beta_scale == scale
    assert val(given.decay).dtype == dtype and val(given.decay_bias).shape == (HEADS, 1)


@DTYPES
def test_the_delta_rule_takes_gates_per_channel(dtype: torch.dtype) -> None:
    def layer(x: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        g = (a.float() + bias.float().view(1, 1, -1)).view(x.shape)
        softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
        return delta(rate.view(1, 1, HEADS, 1) * softplus, torch.sigmoid(b), x)

    cast = {"aten.to.dtype", "aten._to_copy.default"} if dtype == torch.bfloat16 else set()
    inputs = gates(dtype, DIM)
    gm = trace(layer, **inputs)
    after, _ = apply(gm, fuse_recurrences())
    assert not {"aten.where.self", "aten.log.default", "aten.sigmoid.default"} & set(
        histogram(after)
    )
    (node,) = calls(after.graph, delta_rule.overload)
    assert val(arguments(node).decay_bias).shape == (HEADS, DIM)
    assert len(cast & set(histogram(after))) <= 1  # of the bias, a parameter
    assert_same(after, gm, Values.of(**inputs), 4e-2 if cast else 1e-5)


@pytest.mark.parametrize(
    "decay",
    [
        lambda a, rate, bias: rate * F.softplus(a + bias, beta=2.0),
        lambda a, rate, bias: rate * torch.tanh(a + bias),
        lambda a, rate, bias: rate.flip(0).cumsum(0)[:1] * F.softplus(a + bias),
        lambda a, rate, bias: a * F.softplus(a + bias),  # no rate of a head, but of a token
        lambda a, rate, bias: rate * F.softplus(a[..., :1] + bias),
    ],
    ids=[
        "another softplus", "another function", "one rate for all heads", "no weight",
        "one number for all heads",
    ],
)  # fmt: skip
def test_other_decays_stay(decay: Callable[..., Tensor]) -> None:
    def layer(x: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        g = decay(a, rate, bias)
        return delta(g[..., 0] if g.dim() == 4 else g, b, x)

    after, _ = apply(trace(layer, **gates(torch.float32, 1)), fuse_recurrences())
    (node,) = calls(after.graph, delta_rule.overload)
    assert arguments(node).decay_rate is None and arguments(node).beta_scale is None


def scan(x: Tensor, dt: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    a = x.new_full((HEADS, 1), -0.5, dtype=torch.float32)
    options = (None, None, None, True, 0.0, math.inf, dtype)
    return selective_scan.overload(x[0], dt[0], a, b[0], b[0], *options, *[None] * 4)[None]


def grouped(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    given = (q[0], k[0], x[0], b[0][..., None], b[0], 0.5, 1e-6, None, None, None)
    return delta_rule.overload(*given, *[None] * 4)[None]


def test_the_delta_rule_reads_groups_without_copies_for_each_head() -> None:
    def layer(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
        q, k = (y.repeat_interleave(HEADS // 2, dim=2) for y in (q, k))
        return grouped(x, q, k, b)

    small = {n: step(rand(1, TOKENS, 2, DIM), dynamic=1) for n in "qk"}
    x, b = step(rand(1, TOKENS, HEADS, DIM), dynamic=1), step(rand(1, TOKENS, HEADS), dynamic=1)
    given = fused(layer, delta_rule, set(), x=x, **small, b=b)
    assert val(given.query).shape[1:] == val(given.key).shape[1:] == (2, DIM)


@pytest.mark.parametrize(
    "repeat",
    [
        lambda q, k: (q.repeat_interleave(2, 2), k.repeat(1, 1, 2, 1)),
        lambda q, k: (q.repeat_interleave(2, 2), k[:, :, :1].repeat_interleave(4, 2)),
        lambda q, k: [y.repeat_interleave(2, 3).view(1, -1, HEADS, DIM) for y in (q, k)],
    ],
    ids=["another order", "other groups", "channels"],
)
def test_other_copies_of_groups_stay(repeat: Callable[..., Any]) -> None:
    def layer(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
        return grouped(x, *repeat(q, k), b)

    small = {n: step(rand(1, TOKENS, 2, DIM), dynamic=1) for n in "qk"}
    x, b = step(rand(1, TOKENS, HEADS, DIM), dynamic=1), step(rand(1, TOKENS, HEADS), dynamic=1)
    _, (report,) = apply(trace(layer, x=x, **small, b=b), fuse_recurrences())
    assert not report.changed


@DTYPES
def test_a_scan_takes_the_gate_and_the_cast_after_it(dtype: torch.dtype) -> None:
    def layer(x: Tensor, dt: Tensor, b: Tensor, z: Tensor) -> Tensor:
        y = scan(x, dt, b, torch.float32).reshape(1, -1, HEADS * DIM)
        return (y * F.silu(z)).to(x.dtype)

    inputs = {
        "x": step(rand(1, TOKENS, HEADS, DIM).to(dtype), dynamic=1),
        "dt": step(rand(1, TOKENS, HEADS).to(dtype), dynamic=1),
        "b": step(rand(1, TOKENS, 2, 3).to(dtype), dynamic=1),
        "z": step(rand(1, TOKENS, HEADS * DIM).to(dtype), dynamic=1),
    }
    given = fused(layer, selective_scan, {"aten.new_full.default"}, **inputs)
    assert val(given.gate).shape[1:] == (HEADS, DIM) and given.dtype == dtype
