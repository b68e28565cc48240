"""Measures how far two runs of the same tokens deviate, and how far they may.

Errors are relative: the norm of the difference over the norm of the reference, over all tokens.
In a low-precision dtype both sides round, each in its own order. The baseline is then the model's
own code in float32, and the step may deviate from it at most twice as much as the model's own code
in that dtype. If float32 does not fit in memory, only the stated tolerances apply.

Some models choose: experts for each token, or the keys to attend to. Where two candidates are
nearly equal, rounding decides, and the other choice changes the token by far more than rounding
does. A few such tokens among the compared ones would decide about the sum of all errors, so in a
low-precision dtype the errors of these models are medians over the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Average = Literal["mean", "median"]  # over tokens; the mean of errors is that of their squares

_NOISE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Limits of deviation. `kl` in nats per token, `top1`: the share of tokens that agree."""

    relative: float
    kl: float
    top1: float


TOLERANCES = {
    "float32": Tolerance(relative=2e-5, kl=1e-6, top1=1.0),
    "float16": Tolerance(relative=1e-2, kl=1e-3, top1=0.98),
    "bfloat16": Tolerance(relative=5e-2, kl=1e-2, top1=0.95),
    "float8": Tolerance(relative=2.5e-1, kl=5e-2, top1=0.85),  # of the inputs of fp8 linears
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The difference of one hidden state or of the logits, over all tokens of all sequences."""

    max_abs: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDeviation:
    """`kl`: the average over tokens. `top1` counts tokens whose two best logits are closer than the
    tolerance as agreeing."""

    max_abs: float
    relative: float
    kl: float
    kl_max: float
    top1: float
    num_tokens: int
    num_ties: int


def deviation(
    reference: Sequence[Tensor], other: Sequence[Tensor], average: Average = "mean"
) -> Deviation:
    """The deviation of tensors [T, N], one per sequence. NaN anywhere makes the error infinite, and
    so does an infinity that only one of them has: some models ban tokens by logits of -inf."""
    want, have = torch.cat(list(reference)).double(), torch.cat(list(other)).double()
    difference = (want - have).nan_to_num(nan=float("inf")).where(want != have, 0)
    squares, scale = difference.square().sum(-1), want.where(want.isfinite(), 0).square().sum(-1)
    error = _average(squares, average)
    largest = float(difference.abs().max())
    if largest == float("inf"):
        error = largest
    return Deviation(max_abs=largest, relative=(error / max(float(scale.mean()), 1e-60)) ** 0.5)


def _average(by_token: Tensor, average: Average) -> float:
    return float(by_token.mean() if average == "mean" else by_token.median())


def logits_deviation(
    reference: Sequence[Tensor], other: Sequence[Tensor], tie: float, average: Average = "mean"
) -> LogitsDeviation:
    """The deviation of logits. `tie`: if the best logit leads by less than this share of the
    standard deviation, the token counts as tied."""
    want, have = torch.cat(list(reference)).double(), torch.cat(list(other)).double()
    plain = deviation(reference, other, average)
    log_p, log_q = want.log_softmax(-1), have.log_softmax(-1)
    terms = (log_p.exp() * (log_p - log_q)).where(log_p != -float("inf"), 0)
    kl = terms.sum(-1).nan_to_num(nan=float("inf")).clamp(min=0)
    best = want.topk(2, -1).values
    tied = best[:, 0] - best[:, 1] < tie * _spread(want)
    same = (want.argmax(-1) == have.argmax(-1)) | tied
    return LogitsDeviation(
        max_abs=plain.max_abs,
        relative=plain.relative,
        kl=_average(kl, average),
        kl_max=float(kl.max()),
        top1=float(same.double().mean()),
        num_tokens=len(same),
        num_ties=int(tied.sum()),
    )


def _spread(logits: Tensor) -> Tensor:
    """The standard deviation of each token's finite logits."""
    known = logits.isfinite()
    count = known.sum(-1, keepdim=True)
    mean = logits.where(known, 0).sum(-1, keepdim=True) / count
    squares = (logits - mean).where(known, 0).square().sum(-1)
    return (squares / (count[:, 0] - 1)).sqrt()


def allowed(stated: Tolerance, noise: LogitsDeviation | None) -> Tolerance:
    """The tolerance for the logits; `noise` is the deviation due to the model's own rounding."""
    if noise is None:
        return stated
    return Tolerance(
        relative=_NOISE_FACTOR * noise.relative,
        kl=_NOISE_FACTOR**2 * noise.kl,  # grows with the square of the error
        top1=min(stated.top1, 1 - _NOISE_FACTOR * (1 - noise.top1)),
    )


def allowed_hidden(stated: Tolerance, noise: Deviation | None) -> float:
    return stated.relative if noise is None else _NOISE_FACTOR * noise.relative


def within(found: LogitsDeviation, limit: Tolerance) -> bool:
    return found.relative <= limit.relative and found.kl <= limit.kl and found.top1 >= limit.top1
