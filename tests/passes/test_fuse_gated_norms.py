"""fuse_gated_norms: an RMSNorm and the gate before or after it become one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, step, trace, weight
from torch import Tensor

from llmc.passes.base import histogram
from llmc.passes.edit import arguments, calls, val
from llmc.passes.fuse_gated_norms import fuse_gated_norms

GEN = torch.Generator().manual_seed(0)
EPS = 1e-5


def inputs(dtype: torch.dtype, width: int = 8) -> dict[str, Arg]:
    x, gate = (torch.randn(1, 5, 3, width, generator=GEN).to(dtype) for _ in range(2))
    w = torch.randn(width, generator=GEN).to(dtype)
    return {"x": step(x, dynamic=1), "gate": step(gate, dynamic=1), "w": weight("w", w)}


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def by_head(act: Callable[[Tensor], Tensor], *, strict: bool) -> Callable[..., Tensor]:
    """Tokens and heads in one dimension; `strict`: the weight multiplies in float32."""

    def fn(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        x, gate = x.reshape(-1, x.shape[-1]), gate.reshape(-1, gate.shape[-1])
        y = normalized(x.float())
        y = w.float() * y if strict else w * y.to(x.dtype)
        return (y * act(gate.float())).to(x.dtype).reshape(1, -1, 3, x.shape[-1])

    return fn


def by_group(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    """Two groups of channels, after the gate."""
    y = x.float() * F.silu(gate.float())
    y = normalized(y.view(*y.shape[:-1], 2, -1)).view(y.shape)
    return (w * y.to(x.dtype)).to(x.dtype)


def by_group_of_the_weight(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    y = x * F.silu(gate.to(torch.float32))
    y = y.to(torch.float32).view(*y.shape[:-1], 2, 4)
    y = w.view(2, 4) * normalized(y)
    return y.view(x.shape).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "act", "first", "group"),
    [
        (by_head(F.silu, strict=False), "silu", False, 8),
        (by_head(torch.sigmoid, strict=True), "sigmoid", False, 8),
        (by_group, "silu", True, 4),
        (by_group_of_the_weight, "silu", True, 4),
    ],
    ids=["by head", "by head, strict", "by group", "by group of the weight"],
)
def test_rewrites(
    fn: Callable[..., Any], act: str, first: bool, group: int, dtype: torch.dtype
) -> None:
    given = inputs(dtype)
    gm = trace(fn, **given)
    fused, (report,) = apply(gm, fuse_gated_norms())
    assert report.added["llmc.gated_rms_norm.default"] == 1
    left = {name for name in histogram(fused) if "view" not in name and "reshape" not in name}
    assert left <= {"llmc.gated_rms_norm.default", "aten.sym_size.int"}
    (node,) = calls(fused.graph, torch.ops.llmc.gated_rms_norm.default)
    found = arguments(node)
    assert (found.act, found.gate_first, found.group) == (act, first, group)
    assert val(found.gate).dim() == 4  # the gate is not copied to merge heads with tokens
    assert_same(fused, gm, Values.of(**given), 2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert_idempotent(gm, fuse_gated_norms())


def other(fn: Callable[..., Any]) -> None:
    _, (report,) = apply(trace(fn, **inputs(torch.float32)), fuse_gated_norms())
    assert not report.changed


def test_leaves_alone_norms_without_a_gate_and_other_gates() -> None:
    other(lambda x, gate, w: w * normalized(x) + gate)
    other(lambda x, gate, w: w * normalized(x) * torch.tanh(gate))
    other(lambda x, gate, w: w * normalized(x) * F.silu(gate[..., :1]))  # one gate for all channels


def test_leaves_alone_a_norm_that_is_also_read_without_the_gate() -> None:
    def read_twice(x: Tensor, gate: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = w * normalized(x)
        return y * F.silu(gate), y

    other(read_twice)


def test_a_weight_shared_by_groups_stays() -> None:
    """The op's weight has a number for every channel."""

    def shared(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        y = x * F.silu(gate)
        return (w[:4] * normalized(y.view(1, -1, 3, 2, 4))).view(x.shape)

    fused, _ = apply(trace(shared, **inputs(torch.float32)), fuse_gated_norms())
    assert histogram(fused)["aten.mul.Tensor"] >= 1
