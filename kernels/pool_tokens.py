"""`pool_tokens`: the marker for pooling in a model that returns vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(shape="hidden")
def pool_tokens(hidden: Tensor) -> Tensor:
    """hidden [1, T, N] -> [1, T, N]: for each token, its sequence pooled up to that token.

    passes/pool.py replaces it with the pooling; the marker alone is last-token pooling.
    """
    return hidden.clone()


@pool_tokens.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    yield (torch.arange(30).reshape(1, 5, 6).to(device, dtype),)
