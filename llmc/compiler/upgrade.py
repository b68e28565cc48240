"""Compile in the background while the uncompiled step serves, then exchange the two."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from llmc.compiler.lower import StepFunction

log = logging.getLogger(__name__)


class Upgrade:
    """Runs `compile_step` in a thread and hands its result to `install` when it is ready.

    A failure is logged once and leaves what runs in place. `wait()` is for benchmarks and tests.
    """

    def __init__(
        self,
        compile_step: Callable[[], StepFunction],
        install: Callable[[StepFunction], None],
    ) -> None:
        self._compile = compile_step
        self._install = install
        self.error: Exception | None = None
        self.seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="llmc-compile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            step = self._compile()
        except Exception as e:  # the compiler's own code: whatever it raises, serving goes on
            self.error = e
            reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else ""
            log.warning(
                "compiling failed (%s: %s); the uncompiled step stays", type(e).__name__, reason
            )
            return
        self._install(step)
        self.seconds = time.perf_counter() - start
        log.info("compiled step (-O%d) in use after %.1f s", step.level, self.seconds)

    def wait(self, timeout: float | None = None) -> bool:
        """True once the compiled step is in use."""
        self._thread.join(timeout)
        return self.seconds is not None
