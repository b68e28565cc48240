"""Times the phases of a start or a check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmc.model_info import OnPhase, Phase


class PhaseClock:
    """Times phases, appends each to `phases` when it ends, and calls `on_phase` with it."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.phases: list[Phase] = []
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time a block, which may append details to the list that it receives."""
        start = time.perf_counter()
        detail: list[str] = []
        yield detail
        phase = Phase(name=name, seconds=time.perf_counter() - start, detail=", ".join(detail))
        self.phases.append(phase)
        if self._on_phase is not None:
            self._on_phase(phase)
