"""Runs one part in a separate process, so that it can be stopped and its failures are contained."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.parts import Part
from bench.tree import ROOT

_TAIL = 3000


class PartProcess:
    """Starts on creation. `result()` returns the results so far, at any time."""

    def __init__(self, part: Part, folder: Path, seconds: float) -> None:
        self.part = part
        self._data = folder / f"{part.name}.json"
        self._data.unlink(missing_ok=True)  # of an earlier run
        self._log = folder / f"{part.name}.log"
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._deadline = self._begun + seconds
        self._stopped = self._closed = False
        command = [sys.executable, "-u", "-m", "bench.gpu", "--child", part.name]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--child-output", str(self._data)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its children can be stopped with it
            )

    def poll(self) -> bool:
        """Whether it has finished. Stops it if it takes too long."""
        over = self._process.poll() is not None
        if not over and time.monotonic() > self._deadline:
            self._stopped = True
            self.stop()
            over = True
        if over and self._ended is None:
            self._ended = time.monotonic()
            self.stop()
        return over

    def stop(self) -> None:
        """Stop it and surviving compile workers. Only once, because its pid may be reused."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> dict[str, Any]:
        code = self._process.poll()
        status = "running" if code is None else "ok" if code == 0 else "failed"
        found: dict[str, Any] = {
            "status": "timeout" if self._stopped else status,
            "seconds": round((self._ended or time.monotonic()) - self._begun, 1),
            "data": self._read(),
        }
        if found["status"] in ("failed", "timeout"):
            found["error"] = self.log()[-_TAIL:]
        return found

    def _read(self) -> dict[str, Any]:
        if not self._data.is_file():
            return {}
        data: dict[str, Any] = json.loads(self._data.read_text(encoding="utf-8"))
        return data

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")
