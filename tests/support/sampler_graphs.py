"""A graph that ends with logits, and inputs for the graph that `append_sampler` makes from it."""

from __future__ import annotations

import torch
from tiny_graphs import Arg, step, trace
from torch import Tensor

from llmc.kernels.step_inputs import BAD_WORD_TOKENS, ROW_TABLES

ROWS, VOCAB = 3, 40
GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(2, VOCAB, generator=GEN) * 3, dynamic=0)


def tables(**changes: Tensor) -> dict[str, Arg]:
    """Neutral sampling tables of three rows, greedy."""
    sizes = {"rows": ROWS, "context": 2, "biases": 2, "mask words": 2}
    sizes["bad word tokens"] = 2 * BAD_WORD_TOKENS
    made = {
        name: torch.full(table.shape(sizes), table.neutral, dtype=table.dtype)
        for name, table in ROW_TABLES.items()
        if name != "adapter"  # only layers read it
    }
    return {name: step(t) for name, t in (made | changes).items()}


def inputs(**changes: Tensor) -> dict[str, Arg]:
    """Logits row 0 belongs to table row 2, logits row 1 to table row 0."""
    return {
        "x": X,
        "row": step(torch.tensor([2, 0])),
        "length": step(torch.tensor([1, 2], dtype=torch.int32)),
        **tables(**changes),
    }


def graph() -> torch.fx.GraphModule:
    return trace(lambda x: x * 2, x=X)
