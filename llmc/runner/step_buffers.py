"""The packed inputs of a step, at fixed addresses.

`prepare_step` fills them from the rows; the step reads views of the first tokens, requests and
samples. CUDA graphs are captured over these views, so each is created once. The words that the
graphs prepare their inputs from are at a fixed address too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from llmc.kernels.prepare_step import WORK_WORDS, prepare_step
from llmc.kernels.step_inputs import GROUPED, PREPARED, STEP_INPUTS, of_group
from llmc.kernels.write_segments import HEADER_WORDS, write_segments
from llmc.runner.delta import Delta, work_of
from llmc.runner.rows import RowTables

_DELTA_WORDS = 1 << 20  # 4 MiB: also holds a mask of 128,000 tokens for each of 256 rows
StepInputs = dict[str, Tensor]  # by the names of kernels/step_inputs.py


class StepBuffers:
    """Buffers for `max_tokens` tokens of `max_requests` requests; each token can be sampled.

    `delta` [W] int32, if `keeps_delta`: where the words of a step's delta are sent if they fit. The
    header and the work lines always do.
    """

    def __init__(
        self, rows: RowTables, *, max_tokens: int, max_requests: int, keeps_delta: bool = False
    ) -> None:
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
        self.delta: Tensor | None = None
        if keeps_delta:
            size = max(_DELTA_WORDS, HEADER_WORDS + max_requests * WORK_WORDS)
            self.delta = torch.zeros(size, dtype=torch.int32, device=rows.device)
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

    def update_from_delta(self, tokens: int, requests: int, samples: int) -> StepInputs:
        """Update the rows and fill the step's inputs from the words in `delta`. Nothing comes from
        the host, so a graph can replay it for other words."""
        assert self.delta is not None, "these buffers keep no delta"
        write_segments.run(self._rows.memory, self.delta)
        return self.prepare(work_of(self.delta, requests), tokens, samples)

    def keep(self, delta: Delta, sent: Tensor) -> None:
        """Make `delta` hold what `update_from_delta` reads, if `sent` did not fit: the work lines,
        and no segments, which are written here."""
        if self.delta is None or sent.numel() <= self.delta.numel():
            return
        write_segments.run(self._rows.memory, sent)
        end = HEADER_WORDS + delta.num_requests * WORK_WORDS
        self.delta[:end].copy_(sent[:end])
        self.delta[:1].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The inputs of a step of one size, and the outputs of `prepare_step` that they view."""

    inputs: StepInputs
    prepared: tuple[Tensor, ...]
