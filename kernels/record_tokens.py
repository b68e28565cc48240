"""`record_tokens`: what a step drew becomes part of the rows, where the next step reads it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(mutates=("history",))
def record_tokens(history: Tensor, row: Tensor, length: Tensor, token: Tensor) -> None:
    """history[row[s], length[s]] = token[s] for each sample s that is no padding (length 0).

    history [N, L] int32; row, token [S] int64; length [S] int32. A token below 0 (nothing could
    be drawn) becomes 0: a step that is already planned on top of it must not read a wrong index.
    """
    live = length > 0
    history[row[live], length[live].long()] = token[live].clamp(min=0).int()


@record_tokens.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for samples in (1, 5, 70):
        row = torch.arange(samples)
        length = (row * 3 % 8).int()  # some of them 0
        token = torch.arange(samples) * 11 - 1
        history = torch.full((samples + 1, 9), 7, dtype=torch.int32)
        yield (history.to(device), row.to(device), length.to(device), token.to(device))
