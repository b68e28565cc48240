"""Each tiny model is captured once for all tests that only need its graph: a capture takes seconds.

Passes work on copies, so a captured graph serves again and again. Tests whose subject is capturing
call it themselves and share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from llmc.check import check
from llmc.compiler import attention_fallback
from llmc.compiler.build import BuiltModel
from llmc.compiler.cache import config_digest
from llmc.compiler.program import CapturedModel
from llmc.pooling import Head

_known: dict[tuple[str, torch.dtype, str, bool, Head, int | None], CapturedModel] = {}
_capture_model = attention_fallback.capture_model


def _capture(built: BuiltModel, device: torch.device, *, outline: bool = True) -> CapturedModel:
    config = config_digest(built.config)
    key = (config, built.dtype, str(device), outline, built.head, built.context)
    if key not in _known:
        _known[key] = _capture_model(built, device, outline=outline)
    return _known[key]


@contextmanager
def shared_captures() -> Iterator[Any]:
    """Inside, what starts or checks a model takes a graph that is there already."""
    with (
        mock.patch.object(attention_fallback, "capture_model", _capture),
        mock.patch.object(check, "capture_model", _capture),
    ):
        yield
