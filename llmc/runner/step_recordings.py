"""CPU decode steps with few rows, recorded as they run and then replayed without torch.

A step of a small model calls about ten ops per layer, and for some of them torch's call overhead
exceeds the time of the op itself. Steps of one shape read the same buffers, so the second one is
recorded (`kernels/cpu/recording.py`). This is the counterpart of CUDA graphs (`graphs.py`), but
nothing is padded, and the recorded step is itself a real step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from llmc.compiler.lower import StepFunction
from llmc.kernels.cpu.build import is_loaded
from llmc.kernels.cpu.recording import NotRecordable, Recorded, record
from llmc.runner.graphs import StepOutputs, StepShape

logger = logging.getLogger(__name__)

_MAX_ROWS = 8  # with more rows the call overhead does not matter
_RECORDED_AT = 2  # the step of a shape to record: the first one may still load something


class StepRecordings:
    """The current step function's recordings by shape, dropped when the step is swapped."""

    def __init__(self) -> None:
        self._step: StepFunction | None = None
        self._recorded: dict[StepShape, Recorded] = {}
        self._seen: dict[StepShape, int] = {}
        self._is_off = False
        self.num_replays = 0

    def run(
        self, step: StepFunction, shape: StepShape, run: Callable[[], StepOutputs]
    ) -> StepOutputs:
        """Return the result of `run()`, which calls `step` on the buffers for `shape`."""
        if step is not self._step:
            self._follow(step)
        recorded = self._recorded.get(shape)
        if recorded is not None:
            self.num_replays += 1
            outputs: StepOutputs = recorded.replay()
            return outputs
        if self._is_off or not shape.is_decode or shape.requests > _MAX_ROWS:
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
