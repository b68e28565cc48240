"""A graph that ends with logits, and inputs for what `append_sampler` makes of it."""

from __future__ import annotations

import torch
from tiny_graphs import Arg, step, trace
from torch import Tensor

from llmc.passes.append_sampler import BAD_WORD_TOKENS, PER_ROW, TABLES

ROWS, VOCAB = 3, 40
GEN = torch.Generator().manual_seed(0)
X = step(torch.randn(2, VOCAB, generator=GEN) * 3, dynamic=0)


def tables(**changes: Tensor) -> dict[str, Arg]:
    """Neutral sampling tables of three rows, greedy."""
    made: dict[str, Tensor] = {}
    for name, (columns, dtype) in TABLES.items():
        made[name] = torch.zeros((ROWS, 2) if columns else (ROWS,), dtype=dtype)
    for name, dtype in PER_ROW.items():
        made[name] = torch.zeros(ROWS, dtype=dtype)
    made["bias_token"].fill_(-1)
    made["bad_words"] = torch.full((ROWS, 2 * BAD_WORD_TOKENS), -1, dtype=torch.int32)
    made["repetition_penalty"].fill_(1.0)
    made["top_p"].fill_(1.0)
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
