"""Decode steps of a few rows on CPU, recorded as they run and then replayed without torch.

A step of a small model calls some ten ops a layer, and torch takes longer to call them than some of
them take. The steps of one shape read the same buffers, so the second one is recorded
(`kernels/cpu/recording.py`). What GPUs have CUDA graphs for (`graphs.py`), but nothing is padded,
and a recording is a step that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from llmc.compiler.lower import StepFunction
from llmc.kernels.cpu.build import is_loaded
from llmc.kernels.cpu.recording import NotRecordable, Recorded, record
from llmc.runner.graphs import StepOutputs, StepShape

logger = logging.getLogger(__name__)

_MOST_ROWS = 8  # more take long enough by themselves
_RECORDED_AT = 2  # the step of a shape that is recorded: the first one may still load something


class StepRecordings:
    """The recordings of the step function that runs, by shape. A swap of the step drops them."""

    def __init__(self) -> None:
        self._step: StepFunction | None = None
        self._recorded: dict[StepShape, Recorded] = {}
        self._seen: dict[StepShape, int] = {}
        self._is_off = False
        self.num_replays = 0

    def run(
        self, step: StepFunction, shape: StepShape, run: Callable[[], StepOutputs]
    ) -> StepOutputs:
        """What `run()` returns, which calls `step` on the buffers for `shape`."""
        if step is not self._step:
            self._follow(step)
        recorded = self._recorded.get(shape)
        if recorded is not None:
            self.num_replays += 1
            outputs: StepOutputs = recorded.replay()
            return outputs
        if self._is_off or not shape.is_decode or shape.requests > _MOST_ROWS:
            return run()
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return run() if self._seen[shape] < _RECORDED_AT else self._record(shape, run)

    def _record(self, shape: StepShape, run: Callable[[], StepOutputs]) -> StepOutputs:
        recorded = record(run)
        outputs: StepOutputs = recorded.results
        try:
            recorded.check()
        except NotRecordable as error:
            self._is_off = True
            logger.debug("steps are not recorded: %s", error)
        else:
            self._recorded[shape] = recorded
        return outputs

    def _follow(self, step: StepFunction) -> None:
        self._step = step
        self._recorded, self._seen = {}, {}
        self._is_off = not (is_loaded() and step.only_ops)
