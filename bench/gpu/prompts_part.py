"""Times of every kernel that may attend to prompts: what kernels/prompt_table.json is made of."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch

from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import release
from bench.prompts import Shape, describe_run, measure, shapes


def run(settings: Settings, record: Record) -> None:
    """`lines` by shape, as `python -m bench.prompts --take` reads them."""
    device = torch.device(settings.device)
    record.measure("run", partial(describe_run, device))
    if device.type != "cuda":  # Triton's kernels need a GPU; what a line is made of does not
        record.data["lines"] = {shape.name: {} for shape in islice(shapes(), 2)}
        return
    importlib.import_module("llmc.kernels.triton")
    lines = Record()
    record.data["lines"] = lines.data
    for shape in shapes():
        lines.measure(shape.name, partial(_line, shape, device))
        record.num_failed = lines.num_failed
        record.save()
        release()


def _line(shape: Shape, device: torch.device) -> dict[str, Any]:
    line = measure(shape, device)
    times = ", ".join(f"{name} {ms:.4f}" for name, ms in line.ms.items())
    print(f"  {times} -> {line.fastest}", flush=True)
    return asdict(line)
