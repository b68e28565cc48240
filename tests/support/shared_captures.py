"""Each tiny model is captured once for all tests that only need its graph: a capture takes seconds.

Passes work on copies, so a captured graph serves again and again. Tests whose subject is capturing
call it themselves and share nothing. The conftest.py of a folder whose tests all share imports
`sharing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from llmc.check import check
from llmc.compiler import attention_fallback
from llmc.compiler.build import BuiltModel
from llmc.compiler.cache import config_digest
from llmc.compiler.program import CapturedModel
from llmc.inspect import inspect
from llmc.pooling import Head

# digest of the config, number of weights (some layers may be left out), dtype, device, whether
# layers that repeat are captured once, head, context
_Key = tuple[str, int, torch.dtype, str, bool, Head, int | None]
_known: dict[_Key, CapturedModel] = {}
_capture_model = attention_fallback.capture_model


def capture_once(built: BuiltModel, device: torch.device, *, outline: bool = True) -> CapturedModel:
    config, count = config_digest(built.config), len(built.module.state_dict())
    key = (config, count, built.dtype, str(device), outline, built.head, built.context)
    if key not in _known:
        _known[key] = _capture_model(built, device, outline=outline)
    return _known[key]


@contextmanager
def shared_captures() -> Iterator[Any]:
    """Inside, what starts or checks a model takes a graph that is there already."""
    with (
        mock.patch.object(attention_fallback, "capture_model", capture_once),
        mock.patch.object(check, "capture_model", capture_once),
        mock.patch.object(inspect, "capture_model", capture_once),
    ):
        yield


@pytest.fixture(scope="package", autouse=True)
def sharing() -> Iterator[None]:
    with shared_captures():
        yield
