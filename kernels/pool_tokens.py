"""`pool_tokens`: the marker that stands where a model that returns vectors pools its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(shape="hidden")
def pool_tokens(hidden: Tensor) -> Tensor:
    """hidden [1, T, N] -> [1, T, N]: of each token, what pooling makes of its text up to there.

    passes/pool.py puts the pooling in its place; the marker alone is pooling by the last token.
    """
    return hidden.clone()


@pool_tokens.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    yield (torch.arange(30).reshape(1, 5, 6).to(device, dtype),)
