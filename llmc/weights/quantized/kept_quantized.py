"""Weights that stay as the checkpoint has them: stored bits in the blocks of `quantized_linear`.

`kept_as` says whether its numbers come out exactly; what it has no answer for is dequantized.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import (
    CHANNELS,
    GROUPS,
    INPUTS,
    Format,
    Part,
    Quantization,
    pack_groups,
    pack_weight,
)
from llmc.passes.inputs import WeightInput
from llmc.weights.checkpoint import Readable
from llmc.weights.gguf.tensors import GgufTensor
from llmc.weights.quantized.config_fields import ALL
from llmc.weights.quantized.quantization_config import StoredQuantization, WeightScheme
from llmc.weights.quantized.quantized_tensor import QuantizedTensor
from llmc.weights.quantized.unpack import LowBits

log = logging.getLogger(__name__)

KeptWeights = tuple[tuple[str, Quantization], ...]  # by the parameter's name
_MIDDLE = 8  # the int4 value that stands for 0 without zero points


def kept_weights(tensors: Mapping[str, Readable]) -> KeptWeights:
    """Of a checkpoint's weights those that can stay as they are stored."""
    formats = ((name, _kept_as(tensor)) for name, tensor in sorted(tensors.items()))
    return tuple((name, to) for name, to in formats if to is not None)


def tell_widened(tensors: Mapping[str, Readable], roles: Iterable[WeightInput]) -> None:
    """Log which of a checkpoint's quantized weights take the memory of the model's dtype."""
    quantized = {n: t for n, t in tensors.items() if _is_quantized(t)}
    kept = {p for role in roles if role.quantized and role.quantized.kept for p in role.parts}
    if wide := sorted(quantized.keys() - kept):
        dtype = quantized[wide[0]].dtype
        values = sum(math.prod(quantized[name].shape) for name in wide)
        log.info(
            "%d of %d weights that are stored quantized are widened to %s (%d MiB), for no op "
            "takes them as they are: %s",
            len(wide),
            len(quantized),
            str(dtype).removeprefix("torch."),
            values * dtype.itemsize >> 20,
            ", ".join(wide[:3]),
        )


def _is_quantized(tensor: Readable) -> bool:
    if isinstance(tensor, GgufTensor):
        return tensor.is_quantized
    return isinstance(tensor, QuantizedTensor)


def _kept_as(tensor: Readable) -> Quantization | None:
    if isinstance(tensor, GgufTensor):
        return tensor.kept_as()
    if not isinstance(tensor, QuantizedTensor):
        return None
    if tensor.transposed or len(tensor.shape) != 2 or tensor.weight.dtype == torch.float8_e5m2:
        return None
    to = kept_as(tensor.scheme, tensor.block, tensor.shape, tensor.scale.dtype)
    return to if to is not None and tensor.is_in_order() else None


def expected_weights(stored: StoredQuantization, module: nn.Module) -> KeptWeights:
    """The same by config.json alone, where no tensor is at hand."""
    found = []
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    for name, child in module.named_modules():
        scheme = stored.expected(name)
        if not isinstance(child, nn.Linear) or scheme is None or child is head:
            continue
        if scheme.reorders:
            continue
        block = scheme.block or (1, ALL)
        shape = tuple(child.weight.shape)
        scale = torch.float16 if scheme.layout in ("gptq", "awq") else torch.bfloat16
        if (to := kept_as(scheme, block, shape, scale)) is not None:
            found.append((f"{name}.weight", to))
    return tuple(found)


def kept_as(
    scheme: WeightScheme,
    block: tuple[int, int],
    shape: tuple[int, ...],
    scale_dtype: torch.dtype,
) -> Quantization | None:
    """None where the op can't have it exactly: small groups, or 8 bits with zero points."""
    channels, depth = shape
    format: Format = "fp8" if scheme.is_float else "int8" if scheme.bits == 8 else "int4"
    if channels % CHANNELS or depth % INPUTS or scheme.layout == "mxfp4":
        return None
    if format == "int8" and not scheme.symmetric:
        return None
    stored = block[1] or depth
    group = 0
    if stored < depth or format == "int4":
        fits = (g for g in GROUPS if depth % g == 0 and (stored % g == 0 or stored >= depth))
        group = next(fits, 0)
        if not group:
            return None
    return Quantization(
        format=format,
        group=group,
        wide_scale=format == "int4" and scale_dtype != torch.bfloat16,
        zero=format == "int4" and not scheme.symmetric,
    )


def blocks_of(tensor: QuantizedTensor | GgufTensor, to: Quantization) -> dict[Part, Tensor]:
    """What `quantized_linear` takes, made of the stored bits."""
    if isinstance(tensor, GgufTensor):
        return tensor.blocks(to)
    low = tensor.low_bits()
    channels, depth = low.q.shape
    q, zero = low.q, low.zero
    if zero is not None and not to.zero:
        q, zero = _centered(tensor, low), None
    elif to.format == "int4" and zero is None:
        q = (q + _MIDDLE).view(torch.uint8)
    group = to.group or depth
    column = torch.arange(0, depth, group) // low.block[1]
    row = torch.arange(channels) // low.block[0]

    def spread(grid: Tensor, dtype: torch.dtype) -> Tensor:
        return pack_groups(grid.to(dtype)[row][:, column])

    parts: dict[Part, Tensor] = {
        "weight": pack_weight(q, to),
        "scale": spread(low.scale, to.scale_dtype),
    }
    if zero is not None:
        parts["zero"] = spread(zero, torch.uint8)
    return parts


def _centered(tensor: QuantizedTensor, low: LowBits) -> Tensor:
    """Values of a symmetric scheme that stores its zero points nevertheless."""
    assert low.zero is not None and tensor.zero is not None
    middle = 1 << (tensor.scheme.bits - 1)
    if not bool((low.zero == middle).all()):
        raise CheckpointError(
            f"{tensor.zero.name} has zero points other than {middle}, though quantization_config "
            "says that all are alike; --quantization none takes them as they are"
        )
    return low.q if tensor.scheme.bits == 4 else (low.q ^ middle).view(torch.int8)
