"""`draft_states`: the marker for hidden states that a draft head reads or saves.

A head drafts from hidden states of its target model. After its first draft token these are not
available yet, so it uses its own instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op

CARRIED, LEFT = -1, -2


@op(shape="hidden")
def draft_states(hidden: Tensor, place: int) -> Tensor:
    """hidden [1, T, N] -> [1, T, N], for each token:

    place 0, 1, ...: that hidden state of the target model, whatever `hidden` is;
    CARRIED: `hidden`, or for a draft token, the state saved by the step that drafted it;
    LEFT: `hidden`, which is also saved for a draft token that is drafted after it.

    passes/read_taps.py replaces it with these; the marker alone is the identity.
    """
    return hidden.clone()


@draft_states.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for place in (1, CARRIED, LEFT):
        yield torch.arange(30).reshape(1, 5, 6).to(device, dtype), place
