"""The built-in model: a small decoder trained on a manual of llmc; a chat needs no download.

`model_path()` is where the engine loads it from. The manual is in `manual_*.md`, `train.py` makes
the model from it. Imports nothing heavy.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

MODEL_NAME = "llmc-guide"
NOTICE = (
    "This is llmc's small built-in model: it has learned answers about llmc by heart, knows "
    "nothing else, and misreads about three in ten questions that are worded in a way it has not "
    "seen. For real work name a model: llmc chat MODEL"
)


def model_path() -> Path:
    """The directory of the built-in model, in the form of any other checkpoint."""
    return Path(str(files(__name__))) / "model"
