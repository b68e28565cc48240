"""Times the phases of a start or a check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmc.model_info import OnPhase, Phase, PhaseBegins


class PhaseClock:
    """Times phases, and appends each to `phases` when it ends.

    `on_phase` is called when a phase begins, and when it ends.
    """

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.phases: list[Phase] = []
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time a block, which may append details to the list that it receives."""
        self._tell(PhaseBegins(name=name))
        start = time.perf_counter()
        detail: list[str] = []
        yield detail
        phase = Phase(name=name, seconds=time.perf_counter() - start, detail=", ".join(detail))
        self.phases.append(phase)
        self._tell(phase)

    def _tell(self, phase: PhaseBegins | Phase) -> None:
        if self._on_phase is not None:
            self._on_phase(phase)
