"""Times the kernels that can compute attention of new prompts, by head size and length."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import islice

import torch

from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import release
from bench.prompts import measure, shapes


def run(settings: Settings, record: Record) -> None:
    """`lines` by shape: milliseconds by kernel."""
    device = torch.device(settings.device)
    if device.type != "cuda":  # both kernels need a GPU; the format of a line does not
        record.data["lines"] = {_name(*shape): {} for shape in islice(shapes(), 2)}
        return
    importlib.import_module("llmc.kernels.triton")
    lines = Record()
    record.data["lines"] = lines.data
    for shape in shapes():
        lines.measure(_name(*shape), partial(_line, *shape, device))
        record.num_failed = lines.num_failed
        record.save()
        release()


def _name(head_dim: int, tokens: int) -> str:
    return f"{head_dim} x {tokens}"


def _line(head_dim: int, tokens: int, device: torch.device) -> dict[str, float]:
    ms = measure(head_dim, tokens, device)
    print("  " + ", ".join(f"{name} {one:.4f} ms" for name, one in ms.items()), flush=True)
    return ms
