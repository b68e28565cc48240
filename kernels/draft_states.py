"""`draft_states`: the marker for hidden states that a draft head is handed or leaves.

A head drafts from hidden states of the model that it is for. Behind its first draft token there are
none yet: it takes its own instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op

CARRIED, LEFT = -1, -2


@op(shape="hidden")
def draft_states(hidden: Tensor, place: int) -> Tensor:
    """hidden [1, T, N] -> [1, T, N], of each token:

    place 0, 1, ...: that hidden state of the model that is drafted for, whatever `hidden` is;
    CARRIED: `hidden` or, of a draft token, what the step that drew it has left;
    LEFT: `hidden`, which is left for a draft token that is drawn behind it.

    passes/feed_head.py puts these in its place; the marker alone is the identity.
    """
    return hidden.clone()


@draft_states.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for place in (1, CARRIED, LEFT):
        yield torch.arange(30).reshape(1, 5, 6).to(device, dtype), place
