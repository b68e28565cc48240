"""`tune`: other launch options for the models' decode steps, by bench.tune; the table it writes.

Whole steps are timed, not isolated calls too: in a step other options can be the fastest, so those
of isolated calls could undo what was found, and the time would be halved.
`prompts` adds to the table. The parts that measure models again (`8b-tuned`) use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.tree import ROOT
from llmc.kernels.tuned import load_table

TABLE = "tuned.json"  # beside the results of the parts


def run(settings: Settings, record: Record) -> None:
    if (path := record.beside(TABLE)) is None:
        raise RuntimeError("there is no folder to write the table to")
    record.measure("searches", partial(search, settings, path))


def search(settings: Settings, path: Path) -> dict[str, Any]:
    """Run bench.tune. It is a process of its own because, without a GPU, kernels are interpreted,
    for which Triton must be imported with a variable set."""
    command = [sys.executable, "-m", "bench.tune", "--output-json", str(path)]
    command += ["--seconds", str(settings.tune_seconds)]
    command += ["--steps", ",".join(map(str, settings.tuned_batches))]
    command += ["--context", ",".join(map(str, settings.tuned_contexts))]
    for name in dict.fromkeys(settings.model(name).config for name in settings.tuned):
        command += ["--model", name]
    environment = dict(os.environ)
    if settings.tiny:
        command += ["--tiny", "--only", "attention"]  # so that there is time for candidates
        environment["TRITON_INTERPRET"] = "1"
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return {"lines": json.loads(path.read_text(encoding="utf-8"))["lines"]}


@contextmanager
def using_table(record: Record) -> Iterator[None]:
    """Engines and kernels use the table beside `record`. Raises RuntimeError if there is none."""
    path = record.beside(TABLE)
    if path is None or not path.is_file():
        raise RuntimeError("there is no table: run the parts `tune` and `prompts` first")
    with mock.patch.dict(os.environ, LLMC_TUNED=str(path)):
        load_table.cache_clear()
        try:
            yield
        finally:
            load_table.cache_clear()
