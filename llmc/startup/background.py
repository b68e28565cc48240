"""Better versions of the step are made in the background while a plain one serves.

On CPU the C++ ops may still be compiling when the first request comes; at -O1 and up Inductor
takes seconds to minutes. Each stage's result is exchanged in between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.compiler.lower import StepFunction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """Makes a better step, or None, and puts it in the place of the one that runs."""

    make: Callable[[], StepFunction | None]
    install: Callable[[StepFunction], None]


class Upgrade:
    """Runs `stages` in a thread, one after the other.

    A stage that makes None had nothing to give. A failure is logged once, kept in `error`, and
    leaves what runs in place. `wait()` is for benchmarks and tests.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="llmc-compile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        for stage in self._stages:
            start = time.perf_counter()
            try:
                step = stage.make()
            except Exception as e:  # the compiler's own code: whatever it raises, serving goes on
                self.error = e
                reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else ""
                log.warning(
                    "compiling failed (%s: %s); the step that runs stays", type(e).__name__, reason
                )
                return
            if step is not None:
                stage.install(step)
                log.info(
                    "a faster step (-O%d) is in use after %.1f s",
                    step.level,
                    time.perf_counter() - start,
                )

    def wait(self, timeout: float | None = None) -> bool:
        """True once all stages are through without an error."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None
