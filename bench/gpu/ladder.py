"""`ladder`: a small model at each level, and without dependent launches.

If a level cannot start, the others are still measured. What Inductor gains over graphs alone
decides the default level (`pick_level` in llmc/startup/resolve.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

from bench.gpu.ablation import variant
from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import release
from llmc.kernels.triton import dependent_launch


def run(settings: Settings, record: Record) -> None:
    for level in settings.levels:
        record.measure(f"-O{level}", partial(variant, settings, {"opt_level": level}))
        release()
    record.measure("dependent launch off", partial(_without_dependent_launch, settings))
    release()


def _without_dependent_launch(settings: Settings) -> dict[str, Any]:
    with mock.patch.object(dependent_launch, "supported", return_value=False):
        return variant(settings, {"opt_level": settings.default_level})
