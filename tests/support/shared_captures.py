"""Captures each tiny model once for all tests that only need its graph: a capture takes seconds.

Passes work on copies, so a captured graph can be reused. Tests of capturing itself call it directly
and share nothing. If all tests of a folder share captures, its conftest.py imports `sharing`.
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

# digest of the config, number of weights (some layers may be cut), which of them are not tied
# whatever the config says, dtype, device, whether repeated layers are captured once, head, context
_Key = tuple[str, int, tuple[str, ...], torch.dtype, str, bool, Head, int | None]
_known: dict[_Key, CapturedModel] = {}
_capture_model = attention_fallback.capture_model


def capture_once(built: BuiltModel, device: torch.device, *, outline: bool = True) -> CapturedModel:
    config, count = config_digest(built.config), len(built.module.state_dict())
    shape = (config, count, built.apart, built.dtype)
    key = (*shape, str(device), outline, built.head, built.context)
    if key not in _known:
        _known[key] = _capture_model(built, device, outline=outline)
    return _known[key]


@contextmanager
def shared_captures() -> Iterator[Any]:
    """Inside, starting or checking a model reuses an existing captured graph."""
    with (
        mock.patch.object(attention_fallback, "capture_model", capture_once),
        mock.patch.object(check, "capture_model", capture_once),
        mock.patch.object(inspect, "capture_model", capture_once),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)  # "package" would last to the session's end
def sharing() -> Iterator[None]:
    with shared_captures():
        yield
