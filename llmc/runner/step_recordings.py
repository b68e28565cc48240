"""CPU decode steps with few rows, recorded as they run and then replayed without torch.

A step of a small model calls about ten ops per layer, and for some of them torch's call overhead
exceeds the time of the op itself. Steps of one shape read the same buffers, so the second one is
recorded (`kernels/cpu/recording.py`). This is the counterpart of CUDA graphs (`graphs.py`), but
nothing is padded, and the recorded step is itself a real step.

Inductor's code can't be recorded. So at -O2 and above these steps use the uncompiled step function,
which is faster when it is replayed.
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
        self._uncompiled: StepFunction | None = None  # the one that is recorded
        self._recorded: dict[StepShape, Recorded] = {}
        self._seen: dict[StepShape, int] = {}
        self.num_replays = 0

    def run(
        self, step: StepFunction, shape: StepShape, run: Callable[[StepFunction], StepOutputs]
    ) -> StepOutputs:
        """Return the outputs of `step`. `run` calls a step function on the buffers for `shape`."""
        if step is not self._step:
            self._follow(step)
        recorded = self._recorded.get(shape)
        if recorded is not None:
            self.num_replays += 1
            outputs: StepOutputs = recorded.replay()
            return outputs
        uncompiled = self._uncompiled
        if uncompiled is None or not shape.is_decode or shape.requests > _MAX_ROWS:
            return run(step)
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] < _RECORDED_AT:
            return run(uncompiled)
        return self._record(shape, lambda: run(uncompiled))

    def _record(self, shape: StepShape, run: Callable[[], StepOutputs]) -> StepOutputs:
        recorded = record(run)
        outputs: StepOutputs = recorded.results
        try:
            recorded.check()
        except NotRecordable as error:
            self._uncompiled = None
            logger.debug("steps are not recorded: %s", error)
        else:
            self._recorded[shape] = recorded
        return outputs

    def _follow(self, step: StepFunction) -> None:
        self._step = step
        self._recorded, self._seen = {}, {}
        uncompiled = step.uncompiled or step
        can_record = is_loaded() and uncompiled.only_ops
        self._uncompiled = uncompiled if can_record else None
