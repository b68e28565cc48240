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


def longest(images: Iterable[ImageInput]) -> int:
    """The most tokens that stand for one of the images."""
    return max((image.num_rows for image in images), default=0)


def before_cut(images: Iterable[ImageInput], end: int) -> int:
    """`end`, or where the image begins of whose tokens it would cut off some."""
    for image in images:
        for first, count in image.spans:
            if first < end < first + count:
                return first
    return end


def uncut(images: Iterable[ImageInput], start: int, end: int) -> int:
    """`end`, or one near it by which [start, end) is not empty and cuts no image."""
    cut = before_cut(images, end)
    if cut > start:
        return cut
    return next(sum(span) for image in images for span in image.spans if span[0] == cut)
