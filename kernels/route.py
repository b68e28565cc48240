"""`route`: the norm before a layer's routed experts, and the router, which chooses them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.choose_experts import choose_experts
from llmc.kernels.linear import linear
from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import rms_norm


def _shape(
    *, x: Tensor, count: int, dtype: torch.dtype, shared: int, **others: object
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[0], count + shared
    weight, expert = x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int64)
    return x.new_empty(x.shape), weight, expert


@op(shape=_shape)
def route(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    offset: float,
    router: Tensor,
    bias: Tensor | None,
    slot_mapping: Tensor | None,
    count: int,
    normalized: bool,
    dtype: torch.dtype,
    correction: Tensor | None = None,
    score: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    sum_eps: float = 0.0,
    factor: float = 1.0,
    shared: int = 0,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K], router [E, K], bias [E] -> (y [T, K], weight [T, C], expert [T, C]).

    y = rms_norm(x), and the weights (in dtype) and experts (int64) are `choose_experts` of the
    logits y router^T + bias, of which the last are the gates if gated. Router and bias have x's
    dtype or are float32, and the logits are rounded to theirs.
    """
    y = rms_norm.reference(x, norm_weight, eps, offset)
    logits = linear.reference(y.to(router.dtype), router, bias)
    chosen = choose_experts.reference(
        logits, slot_mapping, count, normalized, dtype, correction, score, groups, kept_groups,
        sum_eps, factor, shared, gated,
    )  # fmt: skip
    return (y, *chosen)


@route.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for tokens, depth, experts, count, biased, padded in (
        (1, 64, 4, 2, False, False),
        (3, 200, 60, 4, True, True),
        (1, 2100, 20, 3, False, False),
        (8, 1100, 37, 8, True, False),
        (12, 64, 8, 2, False, True),
    ):
        x, gain = torch.randn(tokens, depth, generator=gen), torch.rand(depth, generator=gen)
        bias = torch.randn(experts, generator=gen) if biased else torch.zeros(experts)
        # logits so far apart that rounding does not change their order
        order = torch.stack([torch.randperm(experts, generator=gen) for _ in range(tokens)])
        logits = (order - experts / 2) / 8
        y = rms_norm.reference(x, gain, 1e-6, 1.0)
        router = (torch.linalg.pinv(y) @ (logits - bias)).T.contiguous()
        slots = torch.randint(-1, 2, (tokens,), generator=gen).to(device) if padded else None
        given = (part.to(device, dtype) for part in (x, gain, router, bias))
        x, gain, router, bias = given
        yield (
            x, gain, 1e-6, 1.0, router, bias if biased else None, slots, count, padded, dtype
        )  # fmt: skip
        correction = (torch.randperm(experts, generator=gen) / 61).to(device)
        yield (
            x, gain, 1e-6, 1.0, router, bias if biased else None, slots, count, not padded, dtype,
            correction if padded else None, "sigmoid", 1, 1, 1e-3, 2.5,
        )  # fmt: skip
        wide = router.float(), bias.float() if biased else None
        groups = (4, 2) if experts == 8 else (1, 1)
        yield (
            x, gain, 1e-6, 1.0, *wide, slots, count, padded, torch.float32, correction, "sigmoid",
            *groups, 1e-3, 2.5, 2 if padded else 0,
        )  # fmt: skip
        yield (
            x, gain, 1e-6, 1.0, router, bias if biased else None, slots, 2, padded, dtype,
            None, "softmax", 1, 1, 0.0, 1.0, 1, True,
        )  # fmt: skip
