"""Each tiny model is captured once for all tests that only need its graph: a capture takes seconds.

Passes work on copies, so a captured graph serves again and again. Tests whose subject is capturing
call it themselves and share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from llmc.check import check
from llmc.compiler import attention_fallback as forms
from llmc.compiler import program
from llmc.compiler.build import BuiltModel
from llmc.compiler.cache import program_key
from llmc.compiler.capture import CapturedModel
from llmc.passes.pipeline import PipelineOptions

_known: dict[str, CapturedModel] = {}
_ANY = PipelineOptions(block_size=1, max_positions=1, device_type="cpu")


def _capture(
    built: BuiltModel,
    plain: Callable[[], BuiltModel],
    device: torch.device,
    *,
    outline: bool = True,
) -> CapturedModel:
    key = program_key(built.config, built.dtype, device, _ANY, {"outline": outline})
    if key not in _known:
        _known[key] = forms.capture_any(built, plain, device, outline=outline)
    return _known[key]


@contextmanager
def shared_captures() -> Iterator[Any]:
    """Inside, what starts or checks a model takes a graph that is there already."""
    with (
        mock.patch.object(program, "capture_any", _capture),
        mock.patch.object(check, "capture_any", _capture),
    ):
        yield
