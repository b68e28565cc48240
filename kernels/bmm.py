"""`bmm`: several matrix products at once, such as a linear with a weight for each head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, self: Tensor, mat2: Tensor) -> Tensor:
    return self.new_empty(self.shape[0], self.shape[1], mat2.shape[2])


@op(shape=_shape)
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    """self [B, M, K], mat2 [B, K, N] -> self[b] @ mat2[b] [B, M, N] in self's dtype.

    Summed in float32 and rounded once.
    """
    return torch.bmm(self, mat2)


@bmm.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for batch, m, k, n in ((1, 1, 16, 16), (3, 1, 40, 24), (4, 7, 33, 50), (2, 70, 64, 48)):
        for turned in (False, True):  # transposed, as weights [N, K] are
            x = torch.randn(m, batch, k, generator=gen).transpose(0, 1)
            w = torch.randn(batch, n + 8, k, generator=gen)[:, :n].transpose(1, 2) * k**-0.5
            if not turned:
                w = w.contiguous()
            yield x.to(device, dtype), w.to(device, dtype)
