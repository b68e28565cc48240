"""The default model, for tests that need a trained model; skipped if it is not installed."""

from __future__ import annotations

import pytest

from llmc.startup.default_model import default_model

MODEL_NAME = default_model().name
needs_model = pytest.mark.skipif(
    default_model().path is None,
    reason=f"{MODEL_NAME} is not installed: {default_model().install}",
)
