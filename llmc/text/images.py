"""Prepares images and text with the model's processor: token ids and the vision tower's inputs.

    text with a placeholder for each image, images -> Prepared: ids, ImageInputs with their digests

Each image is processed separately, so that its digest and its rows do not depend on other images
in the prompt. That the processor gives the same result for several images is verified at start-up
(startup/verify_images.py).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.errors import InvalidRequestError
from llmc.image_input import ImageInput, ImageTensor

# Outputs of processors that are not image tensors.
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Exceptions that processors raise for images that they can't handle, such as one of a single pixel.
_PROCESSOR_FAULTS = (ValueError, TypeError, RuntimeError, IndexError, ArithmeticError, OSError)

Encode = Callable[[str], list[int]]


class CantRead(Exception):
    """A model's processor can't be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt with images: its token ids, and the images with their `spans` in them."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processed:
    """A processed image whose position in the prompt is not known yet."""

    digest: bytes
    tensors: Mapping[str, ImageTensor]
    replacement: str  # the text that replaces its placeholder
    num_rows: int


class ImagePreparer:
    """Prepares prompts with images. `row_token`: the id whose embeddings the image rows replace.

    Calls are serialized, because processors are not thread-safe.
    """

    def __init__(self, processor: Any, row_token: int) -> None:
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder or not hasattr(processor, "get_text_with_replacements"):
            raise CantRead(f"{type(processor).__name__} does not define a placeholder for images")
        self._processor = processor
        self._row_token = row_token
        self._lock = threading.Lock()

    def prepare(self, text: str, images: Sequence[Any], encode: Encode) -> Prepared:
        """Prepare a prompt. `images` are PIL images in RGB; `encode` tokenizes a text.

        Raises InvalidRequestError if the number of placeholders differs, or the processor can't
        handle an image.
        """
        found = text.count(self.placeholder)
        if found != len(images):
            raise InvalidRequestError(
                f"the prompt has the image placeholder {self.placeholder!r} {found} times, but "
                f"{len(images)} images are given; the numbers must match",
                param="images",
            )
        with self._lock:
            processed = [self._process(image) for image in images]
            whole, _ = self._processor.get_text_with_replacements(
                [text], [one.replacement for one in processed]
            )
        token_ids = encode(whole[0])
        return Prepared(token_ids=token_ids, images=self._placed(token_ids, processed))

    def _process(self, image: Any) -> _Processed:
        try:
            made = dict(
                self._processor(
                    images=[image],
                    text=[self.placeholder],
                    return_text_replacement_offsets=True,
                    images_kwargs={"return_tensors": "pt"},
                )
            )
        except _PROCESSOR_FAULTS as exc:
            raise InvalidRequestError(
                f"the model's processor can't handle an image of {image.width} x {image.height} "
                f"pixels: {str(exc)[:200]}",
                param="images",
            ) from exc
        (offsets,), (ids,) = made.pop("text_replacement_offsets"), made.pop("input_ids")
        tensors = {k: _packed(made[k]) for k in sorted(made) if k not in _TEXT_OUTPUTS}
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(tensor.data)
        return _Processed(
            digest=digest.digest(),
            tensors=tensors,
            replacement=str(offsets[0]["replacement"]),
            num_rows=list(ids).count(self._row_token),
        )

    def _placed(
        self, token_ids: Sequence[int], processed: Sequence[_Processed]
    ) -> tuple[ImageInput, ...]:
        places = np.flatnonzero(np.asarray(token_ids) == self._row_token)
        if len(places) != sum(one.num_rows for one in processed):
            raise InvalidRequestError(
                "the prompt has image tokens in places without an image",
                param="images",
            )
        images, first = [], 0
        for one in processed:
            own = places[first : first + one.num_rows]
            first += one.num_rows
            images.append(ImageInput(digest=one.digest, tensors=one.tensors, spans=_spans(own)))
        return tuple(images)


def _spans(places: Any) -> tuple[tuple[int, int], ...]:
    """Ascending positions as runs of (first, count)."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []
    return tuple((int(run[0]), len(run)) for run in runs)


def _packed(value: Any) -> ImageTensor:
    """Values as bytes, in float32, int64 or bool."""
    is_float = getattr(value, "is_floating_point", None)
    if is_float is not None and is_float():
        value = value.float()  # NumPy has no bfloat16
    array = np.asarray(value)
    kind = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind]
    array = np.ascontiguousarray(array, dtype=kind)
    return ImageTensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
