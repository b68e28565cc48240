"""fuse_convolutions: a recurrent op takes over the short convolution of all its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, ops, run, step, trace, weight
from torch import Tensor

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.selective_scan import selective_scan
from llmc.passes.edit import arguments, calls
from llmc.passes.fuse_convolutions import fuse_convolutions

GROUPS, HEADS, DIM, V_DIM = 2, 4, 3, 5
CHANNELS = {"delta": 2 * GROUPS * DIM + HEADS * V_DIM, "scan": HEADS * DIM + 2 * GROUPS * V_DIM}
FUSED = {"delta": "llmc.conv_delta_rule.default", "scan": "llmc.conv_scan.default"}
Parts = Callable[[Tensor], tuple[Tensor, ...]]


def inputs(kind: str) -> dict[str, Arg]:
    """Seven tokens of three requests, one of which continues; states are new for every graph."""
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    channels, sizes = CHANNELS[kind], (DIM, V_DIM)
    return {
        "positions": step(torch.arange(7)),
        "wide": step(rand(1, 7, channels + 4), dynamic=1),  # a merged projection
        "decay": step(rand(7, HEADS)),
        "taps": weight("taps", rand(channels, 1, 4)),
        "past": step(rand(5, channels, 3), dynamic=None),
        "state": step(rand(5, HEADS, *sizes), dynamic=None),
        "query_start": step(torch.tensor([0, 4, 5, 7]), dynamic=None),
        "context_len": step(torch.tensor([4, 9, 2]), dynamic=None),
        "request_row": step(torch.tensor([3, 0, 1]), dynamic=None),
    }


def convolved(wide: Tensor, taps: Tensor, past: Tensor, *where: Tensor) -> Tensor:
    """[1, T, channels], in the shapes that models use."""
    x = wide[..., 4:].transpose(1, 2)
    y = causal_conv.overload(x[0].T, taps.squeeze(1), None, "silu", None, None, past, *where)
    return y.T[None].transpose(1, 2)


def delta_parts(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = y.split([GROUPS * DIM, GROUPS * DIM, HEADS * V_DIM], dim=-1)
    return *(x.reshape(1, -1, GROUPS, DIM)[0] for x in (q, k)), v.view(1, -1, HEADS, V_DIM)[0]


def scan_parts(y: Tensor) -> tuple[Tensor, ...]:
    x, b, c = y.split([HEADS * DIM, GROUPS * V_DIM, GROUPS * V_DIM], dim=-1)
    return x.view(1, -1, HEADS, DIM)[0], *(z.view(1, -1, GROUPS, V_DIM)[0] for z in (b, c))


def recurrence(kind: str, parts: tuple[Tensor, ...], decay: Tensor, *slots: Tensor) -> Tensor:
    if kind == "delta":
        rest = (decay[..., None], decay, 0.5, 1e-6, None, None, 1.0)
        return delta_rule.overload(*parts, *rest, *slots)
    x, b, c = parts
    rate = -decay.new_ones(HEADS, 1)
    options = (None, None, None, True, 0.0, math.inf, torch.float32)
    return selective_scan.overload(x, decay, rate, b, c, *options, *slots)


def after_convolution(end: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution, then end(its result, positions, decay, state, slots)."""

    def fn(
        positions: Tensor,
        wide: Tensor,
        decay: Tensor,
        taps: Tensor,
        past: Tensor,
        state: Tensor,
        *where: Tensor,
    ) -> Any:
        return end(convolved(wide, taps, past, *where), positions, decay, state, *where)

    return fn


def layer(kind: str, parts: Parts) -> Callable[..., Any]:
    def end(y: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence(kind, parts(y), *rest), positions

    return after_convolution(end)


PARTS: dict[str, Parts] = {"delta": delta_parts, "scan": scan_parts}


@pytest.mark.parametrize("kind", FUSED)
def test_rewrites(kind: str) -> None:
    gm = trace(layer(kind, PARTS[kind]), **inputs(kind))
    fused, (report,) = apply(gm, fuse_convolutions())
    assert report.added == {FUSED[kind]: 1}
    kept = {name for name in ops(fused) if name.startswith("llmc.") or "split" in name}
    assert kept == {FUSED[kind]}
    (node,) = [n for n in fused.graph.nodes if str(n.target) == FUSED[kind]]
    given = arguments(node)
    assert (given.groups, given.conv_act) == (GROUPS, "silu")
    wants, gots = inputs(kind), inputs(kind)
    want, got = run(gm, Values.of(**wants)), run(fused, Values.of(**gots))
    torch.testing.assert_close(got, want)
    for name in ("past", "state"):
        assert not torch.equal(wants[name].tensor, inputs(kind)[name].tensor)
        torch.testing.assert_close(gots[name].tensor, wants[name].tensor)
    assert_idempotent(gm, fuse_convolutions())


def in_another_order(y: Tensor) -> tuple[Tensor, ...]:
    query, key, value = delta_parts(y)
    return key, query, value


def across_heads(y: Tensor) -> tuple[Tensor, ...]:
    query, key, value = delta_parts(y)
    return query.reshape(-1, DIM, GROUPS).transpose(1, 2), key, value


def in_part(y: Tensor) -> tuple[Tensor, ...]:
    query, key, _ = delta_parts(y)
    return query, key, torch.cat((key, query), 1).repeat(1, 1, 2)[..., :V_DIM]


@pytest.mark.parametrize("parts", [in_another_order, across_heads, in_part])
def test_a_recurrence_that_reads_other_channels_stays(parts: Parts) -> None:
    assert_stays(layer("delta", parts))


def assert_stays(fn: Callable[..., Any]) -> None:
    after, (report,) = apply(trace(fn, **inputs("delta")), fuse_convolutions())
    assert not report.changed and len(report.notes) == 1
    assert len(calls(after.graph, delta_rule.overload)) == 1


def test_a_convolution_that_is_read_elsewhere_stays() -> None:
    def end(y: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence("delta", delta_parts(y), *rest), y

    assert_stays(after_convolution(end))


def test_a_convolution_over_other_requests_stays() -> None:
    def end(y: Tensor, positions: Tensor, *rest: Tensor) -> Tensor:
        *before, rows = rest
        return recurrence("delta", delta_parts(y), *before, rows + positions[:3] * 0)

    assert_stays(after_convolution(end))


def test_rests_where_it_is_unwanted() -> None:
    gm = trace(layer("scan", scan_parts), **inputs("scan"))
    _, (report,) = apply(gm, fuse_convolutions(unwanted="no GPU"))
    assert not report.changed and report.notes == ("no GPU",)
