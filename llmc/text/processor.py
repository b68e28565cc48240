"""Loads the model's processor, which computes pixel values of images and fills in placeholders.

Processors of models that also accept videos have a part for them, which needs torchvision and its
own file. They are loaded without this part, as llmc does not support videos.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class _NoVideo:
    """Replaces the class of a processor's video part when transformers looks it up."""

    @staticmethod
    def from_pretrained(*_: Any, **__: Any) -> None:
        """Return None: there is no video part."""


@contextmanager
def without_video() -> Iterator[None]:
    """Inside, processors are created without their video part."""
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
    """transformers' processor of a checkpoint. If there is none that works here, raises OSError,
    ValueError, ImportError or whatever else transformers raises."""
    from transformers import AutoProcessor

    with without_video():
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
