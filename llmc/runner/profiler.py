"""Profiles steps with torch's profiler, on an operator's request."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """One profile at a time; start and stop are called in the thread that runs the steps."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self) -> None:
        if self._running is not None:
            raise RuntimeError("a profile is already being recorded; stop it first")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # There is only one cycle, but torch 2.11 warns about the events of earlier ones otherwise.
        self._running = profile(activities=activities, acc_events=True)
        self._running.start()

    def stop(self, folder: str) -> str:
        """Write a gzipped trace in Chrome's format. -> its path."""
        running, self._running = self._running, None
        if running is None:
            raise RuntimeError("no profile is being recorded; start one first")
        running.stop()
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"llmc-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        running.export_chrome_trace(str(path))
        return str(path)
