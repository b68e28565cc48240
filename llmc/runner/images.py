"""Images of running rows: the embeddings that a step reads, and the positions of its tokens.

    NewRow.images -> places of its placeholder tokens, positions of its tokens     (follow)
    a step with placeholders -> embeddings of its images, encoded when first needed  (inputs)
    a later step -> positions of tokens, which may differ from their places        (shift)

An image is encoded as rows of embeddings, one per placeholder token. A token's place is its index
in the request. The rows stay with the request until its last placeholder is computed, and also in a
cache by digest while there is room. A preempted request finds them there, or they are encoded
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.errors import LlmcError
from llmc.image_input import ImageInput, ImageTensor
from llmc.runner.step_buffers import StepInputs

CACHE_BYTES = 256 << 20  # of the cache of encoded images, on the device


class Tower(Protocol):
    """Encodes images, and computes the positions of the tokens around them."""

    def encode(self, tensors: Mapping[str, Tensor], num_rows: int, /) -> Tensor:
        """An image's tensors on the host -> its rows [num_rows, levels * hidden] on the device."""

    def positions(
        self, token_ids: Tensor, images: Sequence[Mapping[str, Tensor]], mask: Tensor, /
    ) -> Tensor:
        """A prompt's tokens [T], with image tokens marked in `mask` [T] -> positions [axes, T]."""


@dataclass(slots=True, kw_only=True)
class _Row:
    """A request with images.

    `first_row[i]`: number of image rows that tokens before i stand for; `offsets` [axes, prompt]:
    the differences between its tokens' positions and places; `behind`: that of all later tokens;
    `made`: the rows of images that are still needed, by the image's index.
    """

    images: Sequence[ImageInput]
    first_row: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64] | None
    behind: int
    differs: npt.NDArray[np.int64]  # [i]: how many tokens before i require an image step
    made: dict[int, Tensor] = field(default_factory=dict)


class RowImages:
    """Images of the running rows, and the `step` that computes tokens that stand for images.

    `step` can also compute other tokens, and shares the text step's weights and caches. `axes`: how
    many positions a token has; 0: one, which is its place. `no_rows` [1, levels * hidden] has the
    device and dtype of the rows.
    """

    def __init__(
        self,
        step: StepFunction,
        tower: Tower,
        *,
        axes: int,
        no_rows: Tensor,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.step = step
        self._tower = tower
        self._axes = axes
        self._no_rows = no_rows
        self._rows: dict[int, _Row] = {}
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._used_bytes = 0

    def follow(self, plan: StepPlan) -> None:
        """Apply a step's released and new rows."""
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if new.images:
                self._rows[new.row] = self._filled(new)

    def _filled(self, new: NewRow) -> _Row:
        count = new.num_prompt_tokens
        is_image = np.zeros(count, np.bool_)
        for image in new.images:
            for first, length in image.spans:
                is_image[first : first + length] = True
        differs, offsets, behind = is_image, None, 0
        if self._axes:
            token_ids = torch.tensor(new.token_ids[:count], dtype=torch.long)
            tensors = [tensors_of(image) for image in new.images]
            positions = self._tower.positions(token_ids, tensors, torch.from_numpy(is_image))
            offsets = positions.numpy() - np.arange(count)
            behind = int(positions.max()) + 1 - count
            differs = is_image | (offsets != offsets[0]).any(0)
        return _Row(
            images=new.images,
            first_row=_counts(is_image),
            offsets=offsets,
            behind=behind,
            differs=_counts(differs),
        )

    def are_read(self, plan: StepPlan) -> bool:
        """Whether the plan needs the image step."""
        return any(
            (row := self._rows.get(work.row)) is not None
            and _at(row.differs, work.start + work.num_tokens) > _at(row.differs, work.start)
            for work in plan.work
        )

    def inputs(self, plan: StepPlan, tokens: int, positions: Tensor) -> StepInputs:
        """The image step's additional inputs; dummies follow the plan's tokens.

        `positions` [T] are the tokens' places.
        """
        pieces: list[Tensor] = []
        image_row = np.full(tokens, -1, np.int64)
        token = num_rows = 0
        for work in plan.work:
            row = self._rows.get(work.row)
            if row is not None:
                places = np.arange(work.start, min(work.start + work.num_tokens, _prompt(row)))
                here = np.flatnonzero(np.diff(row.first_row)[places]) if len(places) else places
                if len(here):
                    image_row[token + here] = np.arange(num_rows, num_rows + len(here))
                    num_rows += len(here)
                    pieces += self._pieces(row, work)
            token += work.num_tokens
        image_rows = torch.cat(pieces) if pieces else self._no_rows
        inputs = {"image_rows": image_rows, "image_row": self._sent(image_row)}
        if self._axes:
            offsets = np.zeros((self._axes, tokens), np.int64)
            self._add_offsets(plan, offsets)
            inputs["axis_positions"] = positions + self._sent(offsets)
        if "attended_span" in self.step.inputs:
            inputs["attended_span"] = self._sent(self._spans(plan, tokens))
        return inputs

    def _spans(self, plan: StepPlan, tokens: int) -> npt.NDArray[np.int64]:
        """[2, tokens]: for each token that stands for an image, the image's first and end place."""
        spans = np.zeros((2, tokens), np.int64)
        token = 0
        for work in plan.work:
            row = self._rows.get(work.row)
            for image in row.images if row is not None else ():
                [(first, count)] = image.spans  # the frontend has checked that there is one
                here = token + first - work.start
                if work.start <= first < work.start + work.num_tokens:
                    assert first + count <= work.start + work.num_tokens, "an image was cut"
                    spans[:, here : here + count] = [[first], [first + count]]
            token += work.num_tokens
        return spans

    @property
    def moves_positions(self) -> bool:
        """Whether the positions of text tokens depend on the images before them (`shift`)."""
        return self._axes > 0

    def shift(self, plan: StepPlan, positions: Tensor) -> None:
        """Turn the places of a text step's tokens, [T], into positions, in place."""
        if self._axes and any(self._has_offset(work) for work in plan.work):
            offsets = np.zeros((1, positions.shape[0]), np.int64)
            self._add_offsets(plan, offsets)
            positions += self._sent(offsets[0])

    def _has_offset(self, work: RowWork) -> bool:
        row = self._rows.get(work.row)
        return row is not None and row.offsets is not None

    def _add_offsets(self, plan: StepPlan, out: npt.NDArray[np.int64]) -> None:
        token = 0
        for work in plan.work:
            row = self._rows.get(work.row)
            if row is not None and row.offsets is not None:
                end = work.start + work.num_tokens
                known = max(0, min(end, _prompt(row)) - work.start)
                part = row.offsets[: len(out), work.start : work.start + known]
                out[:, token : token + known] = part
                out[:, token + known : token + work.num_tokens] = row.behind
            token += work.num_tokens

    def _pieces(self, row: _Row, work: RowWork) -> list[Tensor]:
        """The rows that the tokens of `work` stand for, in order. Drops rows no longer needed."""
        first = _at(row.first_row, work.start)
        end = _at(row.first_row, work.start + work.num_tokens)
        pieces, begin = [], 0
        for number, image in enumerate(row.images):
            stop = begin + image.num_rows
            if begin < end and first < stop:
                if number not in row.made:
                    row.made[number] = self._made_of(image)
                pieces.append(row.made[number][max(first - begin, 0) : end - begin])
            if stop <= end:
                row.made.pop(number, None)
            begin = stop
        return pieces

    def _made_of(self, image: ImageInput) -> Tensor:
        """[n, levels * hidden]. Raises LlmcError if the tower returns a wrong number of rows."""
        found = self._cache.get(image.digest)
        if found is not None:
            self._cache.move_to_end(image.digest)
            return found
        made = self._tower.encode(tensors_of(image), image.num_rows)
        if made.shape[0] != image.num_rows:
            raise LlmcError(
                f"the model encoded an image as {made.shape[0]} rows, but its processor put "
                f"{image.num_rows} tokens for it into the prompt"
            )
        self._cache[image.digest] = made
        self._used_bytes += made.nbytes
        while self._used_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._used_bytes -= oldest.nbytes
        return made

    def _sent(self, values: npt.NDArray[np.int64]) -> Tensor:
        """On the device. A GPU is not waited for, as it would be for memory that is not pinned."""
        here, device = torch.from_numpy(values), self._no_rows.device
        if device.type == "cuda":
            here = here.pin_memory()
        return here.to(device, non_blocking=True)


def _counts(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[n] -> [n + 1]: how many are marked before each index."""
    counts = np.zeros(len(marks) + 1, np.int64)
    np.cumsum(marks, out=counts[1:])
    return counts


def _at(counts: npt.NDArray[np.int64], place: int) -> int:
    """Read a result of `_counts`; nothing is marked after the prompt."""
    return int(counts[min(place, len(counts) - 1)])


def _prompt(row: _Row) -> int:
    return len(row.first_row) - 1


def tensors_of(image: ImageInput) -> dict[str, Tensor]:
    """The output tensors of the image's processor, on the host."""
    return {name: _tensor(tensor) for name, tensor in image.tensors.items()}


def _tensor(tensor: ImageTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)
