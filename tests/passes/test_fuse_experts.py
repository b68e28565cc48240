"""fuse_experts: the activation between the linears of routed experts becomes part of the first, the
sum after them part of the last, and the norm and the choice before them part of the router."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import quantization_of, quantize
from llmc.kernels.rms_norm import rms_norm
from llmc.passes.fuse_experts import fuse_experts

GEN = torch.Generator().manual_seed(0)
TOKENS, CHOICES, WIDTH, EXPERTS = 5, 3, 32, 6


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN)


INPUTS: dict[str, Arg] = {
    "x": step(rand(TOKENS, WIDTH)),
    "index": step(torch.randint(-1, EXPERTS + 1, (TOKENS * CHOICES,), generator=GEN)),
    "up": weight("up", rand(EXPERTS, 2 * WIDTH, WIDTH)),
    "down": weight("down", rand(EXPERTS, WIDTH, WIDTH)),
}
VALUES = Values.of(**INPUTS)


def experts(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = expert_linear.overload(x, up, None, index, False)
    y = act_mul.overload(y, "quick_gelu", 0.75, 1.0, True)
    return expert_linear.overload(y, down, None, index, False)


def test_the_first_linear_takes_the_activation() -> None:
    gm = trace(experts, **INPUTS)
    fused, (report,) = apply(gm, fuse_experts())
    assert report.removed == {"llmc.act_mul.default": 1} and not report.added
    assert ops(fused) == {"llmc.expert_linear.default": 2}
    assert_same(fused, gm, VALUES)
    assert_idempotent(gm, fuse_experts())


def test_quantized_experts_do_too() -> None:
    to = quantization_of("int8", 2 * WIDTH, WIDTH)
    assert to is not None
    words, scale = (
        part.unflatten(0, (EXPERTS, -1)).contiguous()
        for part in quantize(rand(EXPERTS * 2 * WIDTH, WIDTH), to)
    )
    given = {**INPUTS, "up": weight("up", words), "down": weight("down", scale)}

    def run(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = quantized_expert_linear.overload(x, up, down, None, None, index)
        return act_mul.overload(y, "silu")

    gm = trace(run, **given)
    fused, _ = apply(gm, fuse_experts())
    assert ops(fused) == {"llmc.quantized_expert_linear.default": 1}
    assert_same(fused, gm, Values.of(**given))


def test_a_linear_that_is_read_elsewhere_keeps_its_result() -> None:
    def read_twice(x: Tensor, index: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
        y = expert_linear.overload(x, up, None, index, False)
        return [act_mul.overload(y, "silu"), y]

    gm = trace(read_twice, **INPUTS)
    same, (report,) = apply(gm, fuse_experts())
    assert not report.changed and ops(same) == ops(gm)


LAST: dict[str, Arg] = {
    **INPUTS,
    "x": step(rand(TOKENS * CHOICES, WIDTH)),
    "share": step(rand(TOKENS, CHOICES)),
    "bias": weight("bias", rand(EXPERTS, WIDTH)),
    "residual": step(rand(TOKENS, WIDTH)),
}
SUM = "llmc.sum_expert_linear.default"


@pytest.mark.parametrize("added", [False, True])
def test_the_last_linear_takes_the_sum(added: bool) -> None:
    def run(
        x: Tensor, index: Tensor, down: Tensor, share: Tensor, bias: Tensor, residual: Tensor
    ) -> Tensor:
        y = expert_linear.overload(x, down, bias, index, False)
        return sum_experts.overload(y, share, torch.float64, residual if added else None)

    given = {name: arg for name, arg in LAST.items() if name != "up"}
    gm = trace(run, **given)
    fused, (report,) = apply(gm, fuse_experts())
    assert ops(fused) == {SUM: 1} == report.added
    assert_same(fused, gm, Values.of(**given))
    assert_idempotent(gm, fuse_experts())


def test_the_last_quantized_linear_takes_the_sum() -> None:
    to = quantization_of("int8", WIDTH, WIDTH)
    assert to is not None
    drawn = quantize(rand(EXPERTS * WIDTH, WIDTH), to)
    words, scale = (part.unflatten(0, (EXPERTS, -1)).contiguous() for part in drawn)
    given = {**LAST, "up": weight("up", scale), "down": weight("down", words)}
    del given["bias"]

    def run(
        x: Tensor, index: Tensor, up: Tensor, down: Tensor, share: Tensor, residual: Tensor
    ) -> Tensor:
        y = quantized_expert_linear.overload(x, down, up, None, None, index)
        return sum_experts.overload(y, share, torch.float32, residual)

    gm = trace(run, **given)
    fused, _ = apply(gm, fuse_experts())
    assert ops(fused) == {"llmc.sum_quantized_expert_linear.default": 1}
    assert_same(fused, gm, Values.of(**given))


def total(rows: Tensor, share: Tensor) -> Tensor:
    return sum_experts.overload(rows, share, torch.float32)


def overwriting(x: Tensor, index: Tensor, down: Tensor, share: Tensor) -> Tensor:
    inner = x + 1
    y = expert_linear.overload(inner, down, None, index, False)
    inner.view(-1).add_(1)
    return total(y, share)


SUMS: dict[str, Callable[..., list[Tensor]]] = {
    "results that are read elsewhere": lambda x, index, down, share: [
        y := expert_linear.overload(x, down, None, index, False),
        total(y, share),
    ],
    "results that are added to others": lambda x, index, down, share: [
        total(expert_linear.overload(x, down, None, index, False) + x, share)
    ],
    "activated results": lambda x, index, down, share: [
        total(expert_linear.overload(x, down, None, index, False, None, None, "silu"), share)
    ],
    "inputs that are overwritten before the sum": lambda *given: [overwriting(*given)],
}


@pytest.mark.parametrize("kind", SUMS)
def test_other_sums_are_left_alone(kind: str) -> None:
    def run(x: Tensor, index: Tensor, down: Tensor, share: Tensor) -> list[Tensor]:
        return SUMS[kind](x, index, down, share)

    gm = trace(run, **{name: LAST[name] for name in ("x", "index", "down", "share")})
    same, (report,) = apply(gm, fuse_experts())
    assert not report.changed and ops(same) == ops(gm)


ROUTED: dict[str, Arg] = {
    "x": step(rand(1, TOKENS, WIDTH), dynamic=1),
    "slot_mapping": step(torch.tensor([3, -1, 0, 7, -1])),
    "gain": weight("gain", rand(WIDTH)),
    "router": weight("router", rand(EXPERTS, WIDTH)),
    "bias": weight("bias", rand(EXPERTS)),
    "shared": weight("shared", rand(WIDTH, WIDTH)),
}
ROUTED_VALUES = Values.of(**ROUTED)
ROUTE = "llmc.route.default"


def choose(logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return choose_experts.overload(logits, slots, CHOICES, True, torch.float32)


def routed(
    x: Tensor, slots: Tensor, gain: Tensor, router: Tensor, bias: Tensor, shared: Tensor
) -> list[Tensor]:
    """What experts read, and a linear that also reads the norm."""
    normed = rms_norm.overload(x, gain, 1e-6, 1.0)
    rows = normed.view(-1, WIDTH)
    return [*choose(F.linear(rows, router, bias), slots), rows, F.linear(normed, shared)]


def test_a_router_takes_the_norm_and_the_choice() -> None:
    def run(
        x: Tensor, slot_mapping: Tensor, gain: Tensor, router: Tensor, bias: Tensor, shared: Tensor
    ) -> list[Tensor]:
        return routed(x, slot_mapping, gain, router, bias, shared)

    gm = trace(run, **ROUTED)
    fused, (report,) = apply(gm, fuse_experts())
    made = ops(fused)
    assert made[ROUTE] == 1 and made["aten.linear.default"] == 1
    gone = {"llmc.rms_norm.default", "llmc.choose_experts.default", "aten.linear.default"}
    assert gone <= report.removed.keys()
    assert_same(fused, gm, ROUTED_VALUES)
    assert_idempotent(gm, fuse_experts())


def corrected(logits: Tensor, slots: Tensor, correction: Tensor, *groups: int) -> list[Tensor]:
    given = (logits, slots, CHOICES, True, torch.float32, correction, "sigmoid", *groups)
    return list(choose_experts.overload(*given, 1e-3, 2.5))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_router_takes_a_corrected_choice(kept: int) -> None:
    def run(
        x: Tensor, slot_mapping: Tensor, gain: Tensor, router: Tensor, bias: Tensor
    ) -> list[Tensor]:
        normed = rms_norm.overload(x, gain, 1e-6, 1.0).view(-1, WIDTH)
        return corrected(F.linear(normed, router), slot_mapping, bias, 2, kept)

    given = {name: arg for name, arg in ROUTED.items() if name != "shared"}
    gm = trace(run, **given)
    fused, _ = apply(gm, fuse_experts())
    assert ops(fused)[ROUTE] == 1 and "aten.linear.default" not in ops(fused)
    assert_same(fused, gm, Values.of(**given))


def test_a_router_in_float32_takes_a_narrower_norm() -> None:
    """As the model casts it, and nothing is left of the cast."""

    def run(
        x: Tensor, slot_mapping: Tensor, gain: Tensor, router: Tensor, bias: Tensor
    ) -> list[Tensor]:
        normed = rms_norm.overload(x, gain, 1e-6, 1.0)
        logits = F.linear(normed.view(-1, WIDTH).float(), router)
        return [*corrected(logits, slot_mapping, bias, 1, 1), normed]

    given = {name: arg for name, arg in ROUTED.items() if name != "shared"}
    given |= {"x": step(rand(1, TOKENS, WIDTH).bfloat16(), dynamic=1)}
    given |= {"gain": weight("gain", rand(WIDTH).bfloat16())}
    gm = trace(run, **given)
    fused, _ = apply(gm, fuse_experts())
    assert ops(fused)[ROUTE] == 1
    assert not {"aten.linear.default", "aten.to.dtype", "aten._to_copy.default"} & ops(fused).keys()
    assert_same(fused, gm, Values.of(**given))


OTHERS: dict[str, Callable[..., list[Tensor]]] = {
    "logits that are read elsewhere": lambda x, slots, gain, router: [
        logits := F.linear(rms_norm.overload(x, gain, 1e-6, 0.0).view(-1, WIDTH), router),
        *choose(logits, slots),
    ],
    "a narrower router": lambda x, slots, gain, router: list(
        choose(F.linear(rms_norm.overload(x, gain, 1e-6, 0.0)[0].bfloat16(), router), slots)
    ),
    "a correction computed after the norm": lambda x, slots, gain, router: [
        normed := rms_norm.overload(x, gain, 1e-6, 0.0).view(-1, WIDTH),
        *corrected(F.linear(normed, router), slots, router[:, 0] * normed[0, 0], 1, 1),
    ],
    "no norm": lambda x, slots, gain, router: list(choose(F.linear(x[0] * gain, router), slots)),
    "a weight computed after the norm": lambda x, slots, gain, router: [
        normed := rms_norm.overload(x, gain, 1e-6, 0.0).view(-1, WIDTH),
        *choose(F.linear(normed, router * normed[:1]), slots),
    ],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_routers_are_left_alone(kind: str) -> None:
    def run(x: Tensor, slot_mapping: Tensor, gain: Tensor, router: Tensor) -> list[Tensor]:
        return OTHERS[kind](x, slot_mapping, gain, router)

    given = {name: ROUTED[name] for name in ("x", "slot_mapping", "gain", "router")}
    if kind == "a narrower router":
        given["router"] = weight("router", rand(EXPERTS, WIDTH).bfloat16())
    gm = trace(run, **given)
    same, (report,) = apply(gm, fuse_experts())
    assert not report.changed and ops(same) == ops(gm)


def test_rests_where_it_is_unwanted() -> None:
    _, (report,) = apply(trace(experts, **INPUTS), fuse_experts(unwanted="no GPU"))
    assert not report.changed and report.notes == ("no GPU",)
