"""Times the kernels that can compute attention of new prompts, by head size and length, and writes
from which lengths FlashAttention is faster to the table of launch options.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from itertools import islice

import torch

from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import release
from bench.gpu.tune_part import TABLE, using_table
from bench.prompts import lines, measure, shapes
from bench.tuned_table import write_lines


def run(settings: Settings, record: Record) -> None:
    """`lines` by shape: milliseconds by kernel."""
    device = torch.device(settings.device)
    if device.type != "cuda":  # both kernels need a GPU; the format of a line does not
        record.data["lines"] = {_name(*shape): {} for shape in islice(shapes(), 2)}
    else:
        importlib.import_module("llmc.kernels.triton")
        by_shape = Record()
        record.data["lines"] = by_shape.data
        with _tuned_kernels(record):
            for shape in shapes():
                by_shape.measure(_name(*shape), partial(_line, *shape, device))
                record.num_failed = by_shape.num_failed
                record.save()
                release()
    if (path := record.beside(TABLE)) is not None:
        found = record.data["lines"]
        measured = {shape: found.get(_name(*shape), {}) for shape in shapes()}
        write_lines(path, lines(measured))


def _tuned_kernels(record: Record) -> contextlib.AbstractContextManager[None]:
    """Our kernel with the options that `tune` found, if it ran before."""
    path = record.beside(TABLE)
    is_there = path is not None and path.is_file()
    return using_table(record) if is_there else contextlib.nullcontext()


def _name(head_dim: int, tokens: int) -> str:
    return f"{head_dim} x {tokens}"


def _line(head_dim: int, tokens: int, device: torch.device) -> dict[str, float]:
    ms = measure(head_dim, tokens, device)
    print("  " + ", ".join(f"{name} {one:.4f} ms" for name, one in ms.items()), flush=True)
    return ms
