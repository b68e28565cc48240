"""A prompt's image as passed to the engine: plain data, made by the frontend (text/images.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTensor:
    """A tensor from the model's processor, in native byte order; dtypes are named as in torch."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image: the inputs of its tower, and its placeholder tokens in the prompt.

    `digest` covers all its tensors. `spans` are (first token, count), in order, with one token for
    each row that the tower computes for the image.
    """

    digest: bytes
    tensors: Mapping[str, ImageTensor]
    spans: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.spans)


def digests_within(images: Iterable[ImageInput], start: int, end: int) -> bytes:
    """Concatenate the digests of the images with placeholders in tokens [start, end)."""
    return b"".join(
        image.digest
        for image in images
        if any(first < end and start < first + count for first, count in image.spans)
    )


def longest(images: Iterable[ImageInput]) -> int:
    """The largest number of placeholder tokens of any of the images."""
    return max((image.num_rows for image in images), default=0)


def start_of_cut_image(images: Iterable[ImageInput], end: int) -> int:
    """`end`, or the start of the image span that `end` would cut."""
    for image in images:
        for first, count in image.spans:
            if first < end < first + count:
                return first
    return end


def end_without_cut(images: Iterable[ImageInput], start: int, end: int) -> int:
    """`end`, moved if needed so that [start, end) is not empty and does not cut an image."""
    cut = start_of_cut_image(images, end)
    if cut > start:
        return cut
    return next(sum(span) for image in images for span in image.spans if span[0] == cut)
