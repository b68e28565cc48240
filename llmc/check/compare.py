"""How far two runs of the same tokens are apart, and how far they may be.

Errors are relative: the norm of the difference over the norm of the reference, over all tokens.
In a dtype of low precision both sides round, each in its own order; there the yardstick is the
model's own code in float32, and the step may be at most twice as far from it as the model's own
code in that dtype is. Where float32 does not fit in memory, the stated tolerances alone hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NOISE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Most that a dtype may deviate. `kl` in nats a token, `top1` as a share of the tokens."""

    relative: float
    kl: float
    top1: float


TOLERANCES = {
    "float32": Tolerance(relative=2e-5, kl=1e-6, top1=1.0),
    "float16": Tolerance(relative=1e-2, kl=1e-3, top1=0.98),
    "bfloat16": Tolerance(relative=5e-2, kl=1e-2, top1=0.95),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Difference of one hidden state or of the logits, over all tokens of all sequences."""

    max_abs: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDeviation:
    """`top1` leaves out tokens whose two best logits lie closer together than the tolerance."""

    max_abs: float
    relative: float
    kl_mean: float
    kl_max: float
    top1: float
    num_tokens: int
    num_ties: int


def deviation(reference: Sequence[Tensor], other: Sequence[Tensor]) -> Deviation:
    """Of tensors [T, N], one a sequence. NaN anywhere makes an infinite error."""
    want, have = torch.cat(list(reference)).double(), torch.cat(list(other)).double()
    difference = (want - have).nan_to_num(nan=float("inf"))
    scale = max(float(want.norm()), 1e-30)
    return Deviation(
        max_abs=float(difference.abs().max()), relative=float(difference.norm()) / scale
    )


def logits_deviation(
    reference: Sequence[Tensor], other: Sequence[Tensor], tie: float
) -> LogitsDeviation:
    """`tie`: leads of the best logit below this share of the logits' spread are no lead."""
    want, have = torch.cat(list(reference)).double(), torch.cat(list(other)).double()
    plain = deviation(reference, other)
    log_p, log_q = want.log_softmax(-1), have.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).nan_to_num(nan=float("inf")).clamp(min=0)
    best = want.topk(2, -1).values
    tied = best[:, 0] - best[:, 1] < tie * want.std(-1)
    same = (want.argmax(-1) == have.argmax(-1)) | tied
    return LogitsDeviation(
        max_abs=plain.max_abs,
        relative=plain.relative,
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(same.double().mean()),
        num_tokens=len(same),
        num_ties=int(tied.sum()),
    )


def allowed(stated: Tolerance, noise: LogitsDeviation | None) -> Tolerance:
    """The tolerance for the logits; `noise` is what the model's own rounding amounts to."""
    if noise is None:
        return stated
    return Tolerance(
        relative=_NOISE_FACTOR * noise.relative,
        kl=_NOISE_FACTOR**2 * noise.kl_mean,  # grows with the square of the error
        top1=min(stated.top1, 1 - _NOISE_FACTOR * (1 - noise.top1)),
    )


def allowed_hidden(stated: Tolerance, noise: Deviation | None) -> float:
    return stated.relative if noise is None else _NOISE_FACTOR * noise.relative


def within(found: LogitsDeviation, limit: Tolerance) -> bool:
    return (
        found.relative <= limit.relative and found.kl_mean <= limit.kl and found.top1 >= limit.top1
    )
