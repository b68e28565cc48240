"""Images in prompts, as passed by callers: PIL images, data URLs, parts of chat messages.

    {"prompt": text, "multi_modal_data": {"image": ...}}  -> images_of -> PIL images in RGB
    messages with image parts -> take_images -> messages with {"type": "image"}, PIL images
    text, images -> PromptImages.prepare -> ids and ImageInputs

Nothing is fetched: only data URLs are accepted. Size limits are checked before decoding.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import InvalidRequestError
from llmc.text.chat import IMAGE_PART
from llmc.text.images import CantRead, Encode, ImagePreparer, Prepared

if TYPE_CHECKING:
    from PIL.Image import Image

    from llmc.model_info import ImageInfo

MAX_IMAGE_BYTES = 20 << 20  # of one encoded image
MAX_IMAGE_PIXELS = 32 << 20  # of one decoded image
MAX_PROMPT_PIXELS = 64 << 20  # of all images of a prompt
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # of animations, only the first frame is used
_PARTS = ("image_url", "image", "image_pil")  # types of parts; the last two have a PIL image
_OTHER_SENSES = (
    *("input_audio", "audio_url", "audio", "video_url", "video", "input_video"),
    *("image_embeds", "audio_embeds", "video_embeds", "file", "input_file"),
)
_NO_OTHERS = "this engine reads text and images (image_url), but no audio, video or files"

# Raises InvalidRequestError unless a prompt can have images in these places.
Check = Callable[[Sequence[str]], None]


class PromptImages:
    """Prepares images for a model. Its processor is loaded for the first image."""

    def __init__(self, info: ImageInfo | None, refusal: str, model: str, folder: Path) -> None:
        self._info = info
        self._refusal = refusal
        self._model = model
        self._folder = folder
        self._lock = threading.Lock()
        self._preparer: ImagePreparer | None = None

    def check(self, places: Sequence[str]) -> None:
        """Raise InvalidRequestError unless a prompt can have images in these places."""
        if places and self._info is None:
            raise InvalidRequestError(
                f"{places[0]} is an image, but {self._model} accepts none: {self._refusal}",
                param=places[0],
                code="no_images",
            )
        if places and self._info is not None and len(places) > self._info.max_per_prompt:
            raise InvalidRequestError(
                f"a prompt can have {self._info.max_per_prompt} images, got {len(places)}; the "
                "limit is limit_mm_per_prompt (--limit-mm-per-prompt '{\"image\": N}')",
                param=places[self._info.max_per_prompt],
            )

    def check_scored(self) -> None:
        """Raise InvalidRequestError unless prompts with images can have log-probabilities."""
        if self._info is not None and self._info.most_rows:
            raise InvalidRequestError(
                "prompt_logprobs are not supported with images for this model, because their "
                "tokens must be computed in one step",
                param="prompt_logprobs",
            )

    def prepare(self, text: str, images: Sequence[Image], encode: Encode) -> Prepared:
        """Raises InvalidRequestError if the images don't fit the text or the model."""
        prepared = self._loaded().prepare(text, images, encode)
        if self._info is not None and self._info.most_rows:
            _check_whole(prepared, self._info.most_rows)
        return prepared

    def _loaded(self) -> ImagePreparer:
        from llmc.text.processor import load_processor

        with self._lock:
            if self._preparer is None:
                assert self._info is not None, "checked before"
                try:
                    processor = load_processor(self._folder)
                    self._preparer = ImagePreparer(processor, self._info.row_token)
                except (CantRead, ImportError, OSError, ValueError) as exc:
                    raise InvalidRequestError(
                        f"the image processor of {self._model} can't be loaded: {str(exc)[:200]}",
                        param="images",
                    ) from exc
            return self._preparer


def _check_whole(prepared: Prepared, most_rows: int) -> None:
    """Check the images of a model whose image tokens attend to the whole image."""
    end = 0
    for image in prepared.images:
        if len(image.spans) != 1 or image.spans[0][0] <= end - (end == 0):
            why = "the tokens of its images are not separated from each other"
        elif image.num_rows > most_rows:
            why = (
                f"an image needs {image.num_rows} tokens in one step, but the limit is {most_rows}"
            )
        elif (end := sum(image.spans[0])) == len(prepared.token_ids):
            why = "it ends with an image; put text after it"
        else:
            continue
        raise InvalidRequestError(f"this prompt can't be served: {why}", param="images")


def images_of(given: Any, check: Check) -> list[Image]:
    """The images in a prompt's `multi_modal_data`: {"image": one or a list}, PIL or data URLs."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f'multi_modal_data must be a dict such as {{"image": image}}, got {given!r:.80}',
            param="multi_modal_data",
        )
    found: dict[str, Any] = {}
    for kind, value in given.items():
        if kind != "image":
            raise InvalidRequestError(
                f"multi_modal_data has {kind!r:.40}; {_NO_OTHERS}", param="multi_modal_data"
            )
        each = value if isinstance(value, list | tuple) else [value]
        found |= {f"multi_modal_data.image[{i}]": one for i, one in enumerate(each)}
    return _read(found, check)


def take_images(
    messages: Sequence[Mapping[str, Any]], check: Check
) -> tuple[list[Mapping[str, Any]], list[Image]]:
    """Messages whose image parts are {"type": "image"}, as chat templates expect, and the images in
    order. InvalidRequestError names a part that has no image."""
    found: dict[str, Any] = {}
    taken: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            taken.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            where = f"messages[{index}].content[{number}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _PARTS:
                found[where] = _held(part)
                part = IMAGE_PART
            elif kind in _OTHER_SENSES:
                raise InvalidRequestError(f"{where} has type {kind!r}; {_NO_OTHERS}", param=where)
            parts.append(part)
        taken.append({**message, "content": parts})
    return taken, _read(found, check)


def _held(part: Mapping[str, Any]) -> Any:
    value = part.get(part["type"])
    return value.get("url") if isinstance(value, Mapping) else value


def _read(found: Mapping[str, Any], check: Check) -> list[Image]:
    """Read images by their places, after checking how many there are."""
    check(list(found))
    images: list[Image] = []
    pixels = 0
    for where, given in found.items():
        images.append(read_image(where, given))
        pixels += images[-1].width * images[-1].height
        if pixels > MAX_PROMPT_PIXELS:
            raise InvalidRequestError(
                f"{where} brings the images of this prompt to {pixels} pixels; the limit is "
                f"{MAX_PROMPT_PIXELS}",
                param=where,
            )
    return images


def read_image(where: str, given: Any) -> Image:
    """A PIL image or a data URL -> a PIL image in RGB. InvalidRequestError says what is wrong."""
    try:
        from PIL import Image
    except ImportError as exc:
        raise InvalidRequestError(
            "images need the package pillow, which is not installed: pip install pillow",
            param=where,
        ) from exc
    if isinstance(given, Image.Image):
        return _rgb(where, given)
    if not isinstance(given, str):
        raise InvalidRequestError(
            f"{where} must be a PIL image or a data URL, got {given!r:.80}", param=where
        )
    return _rgb(where, _opened(where, _decoded(where, given)))


def _decoded(where: str, url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not head.startswith("data:"):
        raise InvalidRequestError(
            f"{where} has the address {url[:60]!r}, but images are not fetched; send the image "
            "itself as data:image/png;base64,...",
            param=where,
        )
    if not comma or not head.endswith(";base64"):
        raise InvalidRequestError(
            f"{where} must be a data URL in base64 (data:image/png;base64,...), got {head[:60]!r}",
            param=where,
        )
    if len(body) * 3 // 4 > MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            f"{where} has about {len(body) * 3 // 4} bytes; the limit is {MAX_IMAGE_BYTES}",
            param=where,
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"{where} is not valid base64: {exc}", param=where) from exc


def _opened(where: str, data: bytes) -> Image:
    """Read the header of an image, not its pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as exc:
        raise InvalidRequestError(
            f"{where} is not an image in one of the formats {', '.join(FORMATS)}", param=where
        ) from exc
    except Image.DecompressionBombError as exc:
        raise _too_large(where, str(exc)[:120]) from exc


def _rgb(where: str, image: Image) -> Image:
    """Convert to RGB and apply the EXIF orientation, as transformers does."""
    from PIL import ImageOps

    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise _too_large(where, f"{image.width} x {image.height} pixels")
    try:
        return (ImageOps.exif_transpose(image) or image).convert("RGB")
    # Raised by decoders for damaged data.
    except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, MemoryError) as exc:
        raise InvalidRequestError(
            f"{where} can't be decoded: {str(exc)[:120]}", param=where
        ) from exc


def _too_large(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is too large: {what}; the limit is {MAX_IMAGE_PIXELS} pixels", param=where
    )
