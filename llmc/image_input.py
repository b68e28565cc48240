"""A prompt's image as passed to the engine: plain data, made by the frontend (text/images.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # first token in the prompt, number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTensor:
    """A tensor from the model's processor, in native byte order; dtypes are named as in torch."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image: the inputs of its tower, and its placeholder tokens in the prompt.

    `digest` covers all its tensors. `spans` are those of its tokens, in order, with one token for
    each row that the tower computes for the image.
    """

    digest: bytes
    tensors: Mapping[str, ImageTensor]
    spans: tuple[Span, ...]

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


def start_of_cut_span(spans: Sequence[Span], end: int) -> int:
    """`end`, or the first token of the span that `end` would cut."""
    for first, count in spans:
        if first < end < first + count:
            return first
    return end


def end_without_cut(spans: Sequence[Span], start: int, end: int) -> int:
    """`end`, moved if needed so that [start, end) is not empty and does not cut a span."""
    cut = start_of_cut_span(spans, end)
    if cut > start:
        return cut
    return next(sum(span) for span in spans if span[0] == cut)
