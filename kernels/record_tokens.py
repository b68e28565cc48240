"""`record_tokens`: append a step's sampled tokens to the rows' history, for the next step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


@op(mutates=("history",))
def record_tokens(history: Tensor, row: Tensor, length: Tensor, token: Tensor) -> None:
    """history[row[s], length[s]] = token[s] for each sample s that is not padding (length 0).

    history [N, L] int32; row, token [S] int64; length [S] int32. A token below 0 (nothing could
    be sampled) becomes 0, so that a step already scheduled after it does not read an invalid index.
    """
    live = length > 0
    history[row[live], length[live].long()] = token[live].clamp(min=0).int()


@record_tokens.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for samples in (1, 5, 70):
        row = torch.arange(samples)
        length = (row * 3 % 8).int()  # some are 0
        token = torch.arange(samples) * 11 - 1
        history = torch.full((samples + 1, 9), 7, dtype=torch.int32)
        yield (history.to(device), row.to(device), length.to(device), token.to(device))
