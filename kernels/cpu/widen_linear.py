"""`linear` in 16-bit floats where the C++ ops are missing and the CPU can't multiply these numbers.

There torch multiplies them one by one. Its float32 products, with the conversion of the weight by
blocks that stay in the cache, are twice as fast with 8 rows, and 5 to 8 times with 256.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.cpu.levels import emulates
from llmc.kernels.linear import linear
from llmc.kernels.torch_impl import torch_impl

_NAMES: dict[torch.dtype, Literal["bf16", "fp16"]] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_BLOCK = 2**17  # weights for each thread: 0.5 MiB in float32
_FEW_ROWS = 3  # for which torch's own product, a pass over the weight for each, is no slower


def _is_emulated(*, x: Tensor, weight: Tensor, **others: object) -> bool:
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in _NAMES
        and emulates(_NAMES[x.dtype])
    )


@torch_impl(linear, _is_emulated)
def widen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype, from products in float32."""
    if x.shape[:-1].numel() <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    n, k = weight.shape
    wide = x.float()
    out = x.new_empty(*x.shape[:-1], n)
    rows = max(1, _BLOCK * torch.get_num_threads() // max(1, k))
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        own_bias = None if bias is None else bias[part].float()
        out[..., part] = F.linear(wide, weight[part].float(), own_bias)
    return out
