"""Repacks rows of GGUF files in C++. The reference is in llmc/weights/gguf/blocks.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.kernels.cpu.build import c_functions, is_loaded
from llmc.kernels.quantized_linear import CHANNELS, Part, inputs_of


def pack_gguf(
    rows: NDArray[np.uint8],
    kind: int,
    out: Mapping[Part, Tensor],
    order: NDArray[np.int64] | None = None,
) -> bool:
    """Fill the weight inputs of `quantized_linear` from rows [N, bytes] of blocks.

    kind: the number of the type in files. out: dense, in the type's format; its channels are the
    rows, or rows `order` of them. Returns False, without filling anything, if the C++ ops are not
    loaded, or don't support the type or `out`. IndexError if `order` names a row that is not there.
    """
    weight, scale = out["weight"], out["scale"]
    if not is_loaded() or weight.device.type != "cpu" or scale.dtype == torch.float32:
        return False
    channels = weight.shape[0] * CHANNELS
    assert all(t.is_contiguous() for t in out.values()) and rows.strides[1] == 1
    assert channels == (len(rows) if order is None else len(order))
    if order is not None:
        order = np.ascontiguousarray(order, np.int64)
        first, last = int(order.min()), int(order.max())
        if first < 0 or last >= len(rows):
            raise IndexError(f"rows {first} to {last} are asked of a tensor that has {len(rows)}")
    minimum = out["minimum"].data_ptr() if "minimum" in out else None
    done: bool = _function()(
        kind,
        rows.ctypes.data,
        rows.strides[0],
        None if order is None else order.ctypes.data,
        channels,
        inputs_of(weight),
        weight.data_ptr(),
        scale.data_ptr(),
        minimum,
    )
    return done


@cache
def _function() -> Any:
    function = c_functions().llmc_pack_gguf
    size, address = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int32, address, size, address, size, size, *[address] * 3]
    function.restype = ctypes.c_bool
    return function
