"""`place_rows`: replace the embeddings of an image's placeholder tokens with the image's rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, embeddings: Tensor, **others: object) -> Tensor:
    return torch.empty_like(embeddings)


@op(shape=_shape)
def place_rows(
    embeddings: Tensor,
    image_rows: Tensor | None = None,
    image_row: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """embeddings [..., T, H], image_rows [M, L * H], image_row [T] int64 -> [..., T, H], all floats
    of one dtype.

    Token t gets columns level * H to (level + 1) * H of row image_row[t] of `image_rows`, or keeps
    its own embedding if that is -1. Without rows it is a marker in a captured graph
    (passes/insert_image_rows.py).
    """
    if image_rows is None or image_row is None:
        return embeddings.clone()
    width = embeddings.shape[-1]
    rows = image_rows[:, level * width : (level + 1) * width][image_row.clamp(min=0)]
    return torch.where((image_row >= 0).unsqueeze(-1), rows, embeddings)


@place_rows.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for tokens, rows, width, level in ((1, 1, 8, 0), (7, 3, 33, 0), (5, 2, 16, 2)):
        embeddings = torch.randn(1, tokens, width, generator=gen).to(device, dtype)
        image_rows = torch.randn(rows, width * (level + 1), generator=gen).to(device, dtype)
        image_row = torch.randint(-1, rows, (tokens,), generator=gen).to(device)
        yield embeddings, image_rows, image_row, level
