"""fuse_norms: the ops of a norm, and the sum beside it, become one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tiny_graphs import (
    Arg,
    Values,
    apply,
    assert_idempotent,
    assert_same,
    ops,
    step,
    trace,
    weight,
)
from torch import Tensor

from llmc.kernels.rms_norm import rms_norm
from llmc.passes.edit import arguments, calls
from llmc.passes.fuse_norms import fuse_norms

GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(1, 5, 16, generator=GEN), dynamic=1)
R = step(torch.randn(1, 5, 16, generator=GEN), dynamic=1)
W = weight("w", torch.randn(16, generator=GEN))
B = weight("b", torch.randn(16, generator=GEN))
EPS = 1e-5


def norm(x: Tensor, w: Tensor, *, offset: float = 0.0, dim: int = -1) -> Tensor:
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(dim, keepdim=True) + EPS)
    return (w if offset == 0 else offset + w.float()) * y.to(x.dtype)


def check(fn: Callable[..., Any], added: dict[str, int], **inputs: Arg) -> None:
    gm = trace(fn, **inputs)
    fused, (report,) = apply(gm, fuse_norms())
    assert {k: v for k, v in report.added.items() if "getitem" not in k} == added
    assert "aten.mean.dim" in report.removed and not report.notes
    bf16 = any(a.tensor.dtype == torch.bfloat16 for a in inputs.values())
    # bfloat16: the model rounds twice more than the op does
    assert_same(fused, gm, Values.of(**inputs), 2e-2 if bf16 else 1e-5)
    assert_idempotent(gm, fuse_norms())


def test_rewrites_a_norm() -> None:
    check(lambda x, w: (norm(x, w),), {"llmc.rms_norm.default": 1}, x=X, w=W)


def test_rewrites_a_norm_whose_weight_is_stored_less_one() -> None:
    check(lambda x, w: (norm(x, w, offset=1.0),), {"llmc.rms_norm.default": 1}, x=X, w=W)


def test_rewrites_a_norm_that_takes_a_power() -> None:
    """Gemma 4 writes rsqrt as a power of -0.5, and multiplies by the weight in float32."""

    def power(x: Tensor, w: Tensor) -> Tensor:
        x32 = x.float()
        y = x32 * torch.pow(x32.pow(2).mean(-1, keepdim=True) + EPS, -0.5)
        return (y * w.float()).to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        inputs = {"x": step(X.tensor.to(dtype), dynamic=1), "w": weight("w", W.tensor.to(dtype))}
        gm = trace(power, **inputs)
        fused, (report,) = apply(gm, fuse_norms())
        assert report.added == {"llmc.rms_norm.default": 1} and not report.notes
        assert_same(fused, gm, Values.of(**inputs), 0)
        assert_idempotent(gm, fuse_norms())


def test_rewrites_a_norm_without_weight() -> None:
    def plain(x: Tensor) -> tuple[Tensor]:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),)

    check(plain, {"llmc.rms_norm.default": 1}, x=X)


def test_rewrites_a_norm_with_the_sum_before_it() -> None:
    """The sum lives on as the residual stream, so the fused op gives both."""

    def block(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return norm(h, w), h

    check(block, {"llmc.add_rms_norm.default": 1}, x=X, r=R, w=W)


def test_rewrites_a_norm_with_the_sum_after_it() -> None:
    """As in models that normalize what a layer adds."""
    check(lambda x, r, w: (r + norm(x, w),), {"llmc.norm_add.default": 1}, x=X, r=R, w=W)


def test_rewrites_a_sum_between_two_norms() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(x, w) + r
        return norm(h, w), h

    check(block, {"llmc.norm_add_norm.default": 1}, x=X, r=R, w=W)


def test_leaves_alone_a_norm_that_is_read_beside_the_sum() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = norm(x, w)
        return r + y, y

    check(block, {"llmc.rms_norm.default": 1}, x=X, r=R, w=W)


def test_leaves_alone_a_scaled_sum_after_a_norm() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor]:
        return (torch.add(r, norm(x, w), alpha=2),)

    check(block, {"llmc.rms_norm.default": 1}, x=X, r=R, w=W)


def test_rewrites_in_bfloat16() -> None:
    inputs = {
        "x": step(X.tensor.bfloat16(), dynamic=1),
        "w": weight("w", W.tensor.bfloat16()),
    }
    check(lambda x, w: (norm(x, w),), {"llmc.rms_norm.default": 1}, **inputs)


def test_rewrites_the_library_op() -> None:
    inputs = {"x": X, "w": W}
    gm = trace(lambda x, w: torch.rms_norm(x, (16,), w, EPS), **inputs)
    fused, (report,) = apply(gm, fuse_norms())
    assert report.added == {"llmc.rms_norm.default": 1}
    assert_same(fused, gm, Values.of(**inputs))


def test_leaves_alone_a_mean_over_another_dimension() -> None:
    gm = trace(lambda x, w: norm(x, w, dim=-2), x=X, w=W)
    _, (report,) = apply(gm, fuse_norms())
    assert not report.added
    assert report.notes == ("rsqrt: not a norm over the last dimension",)


def layer_norm(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    x32 = x.float()
    y = (x32 - x32.mean(-1, keepdim=True)) * torch.rsqrt(
        (x32 - x32.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + EPS
    )
    y = w.float() * y
    return (y if b is None else y + b.float()).to(x.dtype)


def test_rewrites_a_layer_norm() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = {
            "x": step(X.tensor.to(dtype), dynamic=1),
            "w": weight("w", W.tensor.to(dtype)), "b": weight("b", B.tensor.to(dtype)),
        }  # fmt: skip
        fused = {"llmc.layer_norm.default": 1}
        check(lambda x, w, b: (layer_norm(x, w, b),), fused, **inputs)
        inputs.pop("b")
        check(lambda x, w: (layer_norm(x, w),), fused, **inputs)


def test_rewrites_a_layer_norm_that_divides() -> None:
    def dividing(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor]:
        centered = x - x.mean(-1, keepdim=True)
        return (
            w * (centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + EPS)) + b,
        )

    check(dividing, {"llmc.layer_norm.default": 1}, x=X, w=W, b=B)


def test_rewrites_a_layer_norm_with_the_sum_before_it() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return layer_norm(h, w), h

    check(block, {"llmc.add_layer_norm.default": 1}, x=X, r=R, w=W)


def test_rewrites_the_library_op_of_a_layer_norm() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        h = x + r
        # computed in float32, as in the first OLMo
        widened = F.layer_norm(h.float(), (16,), None, None, EPS).to(h.dtype)
        return F.layer_norm(x, (16,), w, b, EPS), F.layer_norm(x, (16,), eps=0.5), widened, h

    for dtype in (torch.float32, torch.bfloat16):
        inputs = {
            "x": step(X.tensor.to(dtype), dynamic=1), "r": step(R.tensor.to(dtype), dynamic=1),
            "w": weight("w", W.tensor.to(dtype)), "b": weight("b", B.tensor.to(dtype)),
        }  # fmt: skip
        gm = trace(block, **inputs)
        fused, (report,) = apply(gm, fuse_norms())
        made = {k: v for k, v in report.added.items() if "llmc" in k}
        assert made == {"llmc.layer_norm.default": 2, "llmc.add_layer_norm.default": 1}
        if dtype == torch.bfloat16:
            assert "aten.to.dtype" not in ops(fused)
        assert_same(fused, gm, Values.of(**inputs), 1e-5 if dtype == torch.float32 else 1e-2)
        assert_idempotent(gm, fuse_norms())


def test_leaves_alone_a_layer_norm_over_two_dimensions_or_of_two_means() -> None:
    def two(x: Tensor) -> Tensor:
        return F.layer_norm(x, (4, 16))

    gm = trace(two, x=step(torch.randn(5, 4, 16, generator=GEN)))
    assert not apply(gm, fuse_norms())[1][0].added

    def other_mean(x: Tensor, r: Tensor) -> Tensor:
        centered = x - r.mean(-1, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(
            centered.pow(2).mean(-1, keepdim=True) + EPS
        )

    gm = trace(other_mean, x=X, r=R)
    assert not apply(gm, fuse_norms())[1][0].added


def test_a_computed_weight_of_a_layer_norm_comes_after_the_sum() -> None:
    def block(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return F.layer_norm(h, (16,), w.sin(), b, EPS), h

    inputs = {"x": X, "r": R, "w": W, "b": B}
    gm = trace(block, **inputs)
    fused, (report,) = apply(gm, fuse_norms())
    assert report.added == {"llmc.layer_norm.default": 1}
    assert_same(fused, gm, Values.of(**inputs), 1e-5)


def test_leaves_alone_a_norm_whose_scale_is_read_elsewhere() -> None:
    def scale_out(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return w * (x * scale), scale

    _, (report,) = apply(trace(scale_out, x=X, w=W), fuse_norms())
    assert not report.added and report.notes


def test_leaves_alone_a_weight_that_is_one_number_for_all_channels() -> None:
    """The op's kernels read one for each channel: this one ends before the second."""
    inputs = {"x": X, "w": weight("w", torch.tensor([0.5]))}
    gm = trace(lambda x, w: (norm(x, w),), **inputs)
    fused, (report,) = apply(gm, fuse_norms())
    assert report.added == {"llmc.rms_norm.default": 1}
    (call,) = calls(fused.graph, rms_norm.overload)
    assert arguments(call).weight is None
    assert_same(fused, gm, Values.of(**inputs), 1e-5)


def test_sees_factors_of_the_sums() -> None:
    """eps and the weight's offset can be added with a factor."""

    def of_eps(x: Tensor, w: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return w * (x * torch.rsqrt(torch.add(mean, 0.5, alpha=3)))

    def of_weight(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, torch.add(w, 1.0, alpha=3))

    for fn in (of_eps, of_weight):
        gm = trace(fn, x=X, w=W)
        fused, _ = apply(gm, fuse_norms())
        assert_same(fused, gm, Values.of(x=X, w=W), 1e-5)
