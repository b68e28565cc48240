"""What Inductor is given of a step's inputs; compiled steps themselves are in tests/parity."""

from __future__ import annotations

import torch
import torch._inductor.config

from llmc.compiler import inductor
from llmc.kernels.prompts import Prompts
from llmc.kernels.step_inputs import STEP_INPUTS
from llmc.runner.rows import RowTables
from llmc.runner.step_buffers import StepBuffers


def test_kernels_are_not_measured_in_the_process_that_captures_graphs() -> None:
    """A measurement waits for the device, which a capture in another thread does not survive."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert inductor._config(3, gpu) == {"max_autotune": True, "autotune_in_subproc": True}
    assert inductor._config(3, cpu) == {"max_autotune": True, "autotune_in_subproc": False}
    assert not any(inductor._config(2, gpu).values())
    patches = inductor._config(3, gpu)
    assert patches.keys() <= torch._inductor.config.get_config_copy().keys()


def test_every_step_input_has_an_example_size() -> None:
    rows = RowTables(
        num_rows=2, max_model_len=8, block_size=4, vocab_size=16, device=torch.device("cpu")
    )
    made = StepBuffers(rows, max_tokens=4, max_requests=2).view(4, 2, 4).inputs
    made = {**made, **dict.fromkeys(("prompts", "long_prompts"), Prompts().words())}
    assert set(STEP_INPUTS) == set(made)
    for name, spec in STEP_INPUTS.items():
        assert len(spec.shape(inductor._SIZES)) == made[name].dim(), name
    assert len(set(inductor._SIZES.values())) == len(inductor._SIZES), "equal sizes share a symbol"
