"""What a step needs of its images is sent to a GPU without waiting for the steps before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.image_input import ImageInput, ImageTensor
from llmc.runner.images import RowImages
from llmc.sampling_params import SamplingParams

TOKENS = [5, 9, 9, 6, 7]  # 9 stands for a row of the image


class Tower:
    """Every image token has the position of the first, on both axes."""

    def encode(self, tensors: Any, num_rows: int, /) -> torch.Tensor:
        return torch.ones(num_rows, 4)

    def positions(
        self, token_ids: torch.Tensor, images: Any, mask: torch.Tensor, /
    ) -> torch.Tensor:
        return torch.tensor([[0, 1, 1, 2, 3]] * 2)


def plan(start: int, count: int, *, is_new: bool = False) -> StepPlan:
    pixels = ImageTensor(dtype="float32", shape=(1,), data=np.zeros(1, np.float32).tobytes())
    image = ImageInput(digest=b"d", spans=((1, 2),), tensors={"pixel_values": pixels})
    new = NewRow(
        row=0, request_id="0", token_ids=TOKENS, num_prompt_tokens=5, seed=0, stop_token_ids=(),
        sampling=SamplingParams(), images=(image,),
    )  # fmt: skip
    work = RowWork(row=0, start=start, num_tokens=count, sample=True)
    return StepPlan(step=0, new_rows=[new] if is_new else [], work=[work])


def test_no_step_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[bool, bool]] = []  # is it from pinned memory, does it wait
    pinned: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def to(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        assert device == torch.device("cuda")
        sent.append((tensor.data_ptr() in pinned, not non_blocking))
        return tensor

    step: Any = SimpleNamespace(inputs=("image_rows", "image_row", "axis_positions"))
    images = RowImages(step, Tower(), axes=2, no_rows=torch.zeros(1, 4))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    images._no_rows = on_gpu
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    first, later = plan(0, 5, is_new=True), plan(5, 1)
    images.follow(first)
    assert images.are_read(first)
    given = images.inputs(first, 5, torch.arange(5))
    assert given["image_row"].tolist() == [-1, 0, 1, -1, -1]
    assert given["axis_positions"].tolist() == [[0, 1, 1, 2, 3]] * 2
    assert len(sent) == 2
    assert not images.are_read(later)
    positions = torch.tensor([5])
    images.shift(later, positions)
    assert positions.tolist() == [4]
    assert sent == [(True, False)] * 3
