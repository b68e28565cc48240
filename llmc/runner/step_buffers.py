"""The packed inputs of a step, at fixed addresses.

`prepare_step` fills them from the rows; the step reads views of the first tokens, requests and
samples. CUDA graphs are captured over these views, so each is created once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from llmc.kernels.prepare_step import prepare_step
from llmc.kernels.step_inputs import GROUPED, PREPARED, STEP_INPUTS, of_group
from llmc.runner.rows import RowTables

StepInputs = dict[str, Tensor]  # by the names of kernels/step_inputs.py


class StepBuffers:
    """Buffers for `max_tokens` tokens of `max_requests` requests; each token can be sampled."""

    def __init__(self, rows: RowTables, *, max_tokens: int, max_requests: int) -> None:
        self._rows = rows
        self.max_tokens = max_tokens
        self.max_requests = max_requests

        sizes = self._sizes(max_tokens, max_requests, max_tokens)
        self._buffers: StepInputs = {}
        for name in PREPARED:
            spec = STEP_INPUTS[name]
            groups = (rows.num_groups,) if spec.grouped else ()
            self._buffers[name] = torch.zeros(
                *groups, *spec.shape(sizes), dtype=spec.dtype, device=rows.device
            )
        self.view = lru_cache(maxsize=1024)(self._view)

    def _sizes(self, tokens: int, requests: int, samples: int) -> dict[str, int]:
        blocks = self._rows.max_blocks
        return {"T": tokens, "R": requests, "R + 1": requests + 1, "S": samples, "blocks": blocks}

    def _view(self, tokens: int, requests: int, samples: int) -> _View:
        if tokens > self.max_tokens:
            raise ValueError(
                f"a step of {tokens} tokens exceeds the runner's buffers for {self.max_tokens}"
            )
        sizes = self._sizes(tokens, requests, samples)
        whole: StepInputs = {}
        for name, buffer in self._buffers.items():
            spec = STEP_INPUTS[name]
            used = tuple(slice(size) for size in spec.shape(sizes))
            whole[name] = buffer[(slice(None), *used) if spec.grouped else used]
        inputs = dict(whole)
        for name in GROUPED:
            inputs |= {of_group(name, g): one for g, one in enumerate(whole[name])}
        return _View(inputs=inputs, prepared=tuple(whole.values()))

    def inputs(self, tokens: int, requests: int, samples: int) -> StepInputs:
        """The inputs of a step of these sizes, as last filled."""
        view: _View = self.view(tokens, requests, samples)
        return view.inputs

    def prepare(self, work: Tensor, tokens: int, samples: int) -> StepInputs:
        """`work` [R, 8] int32 on the device -> the step's inputs, filled."""
        view: _View = self.view(tokens, work.shape[0], samples)
        rows = self._rows
        prepare_step.run(
            work,
            rows.tables["history"],
            rows.block_table,
            rows.tables["position_offset"],
            rows.block_size,
            *view.prepared,
        )
        return view.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The inputs of a step of one size, and the outputs of `prepare_step` that they view."""

    inputs: StepInputs
    prepared: tuple[Tensor, ...]
