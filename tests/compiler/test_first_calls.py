"""What modules only set in their first call is set before the code is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmc.compiler.first_calls import make_first_calls


class Table(nn.Module):
    """`scale`: of the table that the first call computes, relative to the one it had."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(16, 4), persistent=False)
        self.scale, self.rows = scale, 0

    def forward(self, x: Tensor, seq_len: int) -> Any:
        if seq_len > self.rows:
            self.rows = seq_len
            self.table = torch.ones(seq_len, 4) * self.scale
        return self.table[:seq_len]


@pytest.mark.parametrize(("scale", "rows"), [(1.0, 16), (2.0, 0)])
def test_calls_that_keep_the_tables_are_made(scale: float, rows: int) -> None:
    model = nn.ModuleList(Table(scale) for _ in range(2))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    make_first_calls(model.to("meta"), buffers)
    assert [table.rows for table in model] == [rows, rows]
    assert all(table.table.is_meta for table in model)
