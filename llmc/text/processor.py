"""The model's own processor: what makes pixel values of an image and placeholders of its text.

Processors of models that also read videos ask for a part for them, which needs torchvision. Where
that is not installed they are loaded without it: llmc reads no video.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock


class _NoVideo:
    """Stands where transformers looks for the class of a processor's part for videos."""

    @staticmethod
    def from_pretrained(*_: Any, **__: Any) -> None:
        """There is none."""


@contextmanager
def without_video() -> Iterator[None]:
    """Inside, processors are made without their part for videos, if torchvision is missing."""
    if find_spec("torchvision") is not None:
        yield
        return
    from transformers import processing_utils

    mixin: Any = processing_utils.ProcessorMixin
    check = mixin.check_argument_for_proper_class
    parts: Any = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING
    find = type(parts).__getitem__

    def checked(self: Any, name: str, part: Any) -> Any:
        if name == "video_processor" and part is None:
            return _NoVideo
        return check(self, name, part)

    def found(self: Any, key: str) -> Any:
        return _NoVideo if key == "video_processor" else find(self, key)

    with (
        mock.patch.object(mixin, "check_argument_for_proper_class", checked),
        mock.patch.object(type(parts), "__getitem__", found),
    ):
        yield


def load_processor(folder: Path) -> Any:
    """transformers' processor of a checkpoint. Raises OSError, ValueError, ImportError and what
    else transformers raises where there is none that works here."""
    from transformers import AutoProcessor

    with without_video():
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
