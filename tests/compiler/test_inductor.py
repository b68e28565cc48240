"""What Inductor is told of a step's inputs; compiled steps themselves are in tests/parity."""

from __future__ import annotations

import torch

from llmc.compiler import inductor
from llmc.kernels.prompts import Prompts
from llmc.runner.rows import RowTables
from llmc.runner.step_buffers import StepBuffers


def test_every_step_input_has_an_example_size() -> None:
    rows = RowTables(
        num_rows=2, max_model_len=8, block_size=4, vocab_size=16, device=torch.device("cpu")
    )
    made = StepBuffers(rows, max_tokens=4, max_requests=2).view(4, 2, 4).inputs
    made = {**made, "prompts": Prompts().words()}
    assert set(inductor._SHAPES) == set(made)
    for name, shape in inductor._SHAPES.items():
        assert len(shape) == made[name].dim()
