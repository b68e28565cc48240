"""An image of a prompt as the engine gets it: plain data, made by the frontend (text/images.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTensor:
    """A tensor of the model's processor, in this machine's byte order; torch's names of dtypes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image: what its tower reads, and which tokens of the prompt stand for it.

    `digest` is of all its tensors. `spans` are (first token, count), in order: as many tokens as
    the tower makes rows of the image.
    """

    digest: bytes
    tensors: Mapping[str, ImageTensor]
    spans: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.spans)


def digests_within(images: Iterable[ImageInput], start: int, end: int) -> bytes:
    """The digests of the images that tokens [start, end) stand for, one after the other."""
    return b"".join(
        image.digest
        for image in images
        if any(first < end and start < first + count for first, count in image.spans)
    )
