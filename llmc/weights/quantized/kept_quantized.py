"""Weights that stay as quantized in the checkpoint: stored bits in blocks of `quantized_linear`.

`kept_as` returns the format that represents the stored values exactly; if there is none, the weight
is dequantized.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
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
    Scale,
    pack_bytes,
    pack_groups,
    pack_weight,
    whole_blocks,
)
from llmc.weights.assignment import Assignment
from llmc.weights.checkpoint import BlockTensor, Readable, SomeOf
from llmc.weights.quantized.config_fields import ALL
from llmc.weights.quantized.quantization_config import StoredQuantization, WeightScheme
from llmc.weights.quantized.quantized_tensor import QuantizedTensor
from llmc.weights.quantized.unpack import LowBits

log = logging.getLogger(__name__)

KeptWeights = tuple[tuple[str, Quantization], ...]  # by the parameter's name
_MIDDLE = 8  # the int4 value that means 0 without zero points


def kept_weights(tensors: Mapping[str, Readable]) -> KeptWeights:
    """The weights of a checkpoint that can stay as stored."""
    formats = ((name, _kept_as(tensor)) for name, tensor in sorted(tensors.items()))
    return tuple((name, to) for name, to in formats if to is not None)


def kept_parameters(module: nn.Module, tensors: Mapping[str, Readable]) -> KeptWeights:
    """The parameters of a model that can stay as their tensors are stored."""
    found = Assignment(module, tensors)
    made_of: dict[str, tuple[Readable, ...]] = {
        name: (tensor,) for name, tensor in found.direct.items()
    }
    made_of |= {name: found.joined(name) for name in found.converted}
    kept = []
    for name, parts in sorted(made_of.items()):
        formats = {_kept_as(part) for part in parts}
        to = formats.pop() if len(formats) == 1 else None
        if to is not None and len(parts) > 1 and to.order:
            to = None
        if any(part.shape[0] % CHANNELS for part in parts[:-1]):  # blocks of several parts
            to = None
        if to is not None:
            kept.append((name, to))
    return tuple(kept)


def log_dequantized(tensors: Mapping[str, Readable], kept: Iterable[Readable]) -> None:
    """Log which of a checkpoint's quantized weights are dequantized to the model's dtype."""
    quantized = {n: t for n, t in tensors.items() if _is_quantized(t)}
    held = {id(tensor) for tensor in kept}
    if wide := sorted(n for n, t in quantized.items() if id(t) not in held):
        dtype = quantized[wide[0]].dtype
        values = sum(math.prod(quantized[name].shape) for name in wide)
        log.info(
            "%d of %d quantized weights are dequantized to %s (%d MiB), because the ops that read "
            "them do not support their format: %s",
            len(wide),
            len(quantized),
            str(dtype).removeprefix("torch."),
            values * dtype.itemsize >> 20,
            ", ".join(wide[:3]),
        )


def _is_quantized(tensor: Readable) -> bool:
    if isinstance(tensor, BlockTensor):
        return tensor.is_quantized
    return isinstance(tensor, QuantizedTensor)


def _kept_as(tensor: Readable) -> Quantization | None:
    if isinstance(tensor, BlockTensor):
        return tensor.kept_as()
    if not isinstance(tensor, QuantizedTensor):
        return None
    if tensor.weight.dtype == torch.float8_e5m2:
        return None
    *experts, channels, depth = tensor.shape
    if tensor.transposed:
        channels, depth = depth, channels
    if experts and channels % CHANNELS:
        return None
    to = kept_as(tensor.scheme, tensor.block, depth, tensor.scale.dtype)
    if to is None:
        return None
    try:
        order = tensor.order()
    except CheckpointError:  # such groups can be dequantized
        return None
    return dataclasses.replace(to, transposed=tensor.transposed, order=_digest(order))


def _digest(order: Tensor | None) -> str:
    if order is None:
        return ""
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


def expected_weights(stored: StoredQuantization, module: nn.Module) -> KeptWeights:
    """The same from config.json alone, when no tensors are available."""
    found = []
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    for name, child in module.named_modules():
        scheme = stored.expected(name, [kind.__name__ for kind in type(child).__mro__])
        if scheme is None or scheme.reorders or child is head:
            continue
        is_mxfp4 = scheme.layout == "mxfp4"  # used only for experts
        block = scheme.block or (1, ALL)
        scale = torch.float16 if scheme.layout in ("gptq", "awq", "awq_gemv") else torch.bfloat16
        for own, parameter in child.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            is_stacked = hasattr(child, "_apply_gate") and len(shape) == 3
            if not (is_stacked or (isinstance(child, nn.Linear) and own == "weight")):
                continue
            if is_stacked != is_mxfp4 and (is_mxfp4 or getattr(child, "is_transposed", False)):
                continue
            channels, depth = shape[:-3:-1] if is_mxfp4 else shape[-2:]
            if is_stacked and channels % CHANNELS:
                continue
            if (to := kept_as(scheme, block, depth, scale)) is not None:
                found.append((f"{name}.{own}", dataclasses.replace(to, transposed=is_mxfp4)))
    return tuple(found)


def kept_as(
    scheme: WeightScheme,
    block: tuple[int, int],
    depth: int,
    scale_dtype: torch.dtype,
) -> Quantization | None:
    """The op's format for a scheme and `depth` inputs; None if it can't represent it exactly: small
    groups, or 8 bits with zero points."""
    format: Format = "fp8" if scheme.is_float else "int8" if scheme.bits == 8 else "int4"
    if depth % INPUTS or scheme.layout == "bnb4":
        return None
    if scheme.layout == "mxfp4" or (scheme.layout == "fp4" and block[1] == 32):
        return Quantization(format="mxfp4", group=block[1], scale="exponent")
    if scheme.layout == "fp4":
        return Quantization(format="nvfp4", group=16) if block[1] == 16 else None
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
        scale=_scale_of(scale_dtype) if format == "int4" else "float32",
        zero=format == "int4" and (not scheme.symmetric or scheme.bits < 4),
    )


def _scale_of(dtype: torch.dtype) -> Scale:
    scales: dict[torch.dtype, Scale] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return scales.get(dtype, "float32")


def blocks_of(
    tensor: QuantizedTensor, to: Quantization, part: SomeOf | None = None
) -> Iterator[dict[Part, Tensor]]:
    """The weight inputs of `quantized_linear`, made from the stored bits of the tensor or of a part
    of it; one item per expert, if there are any. CheckpointError if a part is not whole blocks."""
    channels, inputs = tensor.places(part)
    block = CHANNELS, to.group or INPUTS
    if (part is not None and len(channels) % block[0]) or len(inputs) % block[1]:
        raise CheckpointError(
            f"{tensor.name} can't be sharded among ranks: {len(channels)} channels of "
            f"{len(inputs)} inputs are not whole blocks of {block[0]} and {block[1]}; serve on one "
            "rank, or dequantize with --quantization none"
        )
    if to.format == "mxfp4":
        codes, exponents = (tensor.words(one, part) for one in (tensor.weight, tensor.scale))
        if tensor.scheme.layout == "fp4":  # one matrix
            codes, exponents = codes[None, :, None], exponents[None]
        for rows, scales in zip(codes.flatten(-2), exponents, strict=True):
            yield {
                "weight": pack_bytes(whole_blocks(rows.view(torch.uint8))),
                "scale": pack_groups(whole_blocks(scales.view(torch.uint8))),
            }
    elif to.format == "nvfp4":
        codes = whole_blocks(tensor.words(tensor.weight, part).view(torch.uint8))
        scale = tensor.numbers_of(tensor.scale.read()).float()
        weight = pack_bytes(codes).view(to.dtype)
        yield {
            "weight": weight.view(to.shape("weight", len(codes), len(inputs))),
            "scale": pack_groups(scale[whole_blocks(channels)][:, inputs[::16] // 16]),
        }
    else:
        for low in tensor.low_bits(part).matrices():
            yield _blocks_of(tensor, low, to, whole_blocks(channels), inputs)


def _blocks_of(
    tensor: QuantizedTensor, low: LowBits, to: Quantization, channels: Tensor, inputs: Tensor
) -> dict[Part, Tensor]:
    """`channels` and `inputs`: the indices, in the tensor, of the values in `low`."""
    q, zero = low.q, low.zero
    if zero is not None and not to.zero:
        q, zero = _centered(tensor, low), None
    elif to.format == "int4" and zero is None:
        q = (q + _MIDDLE).view(torch.uint8)
    order = tensor.order() if to.order else None
    if order is not None:
        q = q[:, order]
    column = inputs[:: to.group or len(inputs)] // low.block[1]
    row = channels // low.block[0]

    def spread(grid: Tensor, dtype: torch.dtype) -> Tensor:
        return pack_groups(grid.to(dtype)[row][:, column])

    parts: dict[Part, Tensor] = {
        "weight": pack_weight(whole_blocks(q), to),
        "scale": spread(low.scale, to.scale_dtype),
    }
    if zero is not None:
        parts["zero"] = spread(zero, torch.uint8)
    if order is not None:
        parts["order"] = order.to(torch.int32)
    return parts


def _centered(tensor: QuantizedTensor, low: LowBits) -> Tensor:
    """The values of a symmetric scheme that stores zero points nevertheless."""
    assert low.zero is not None and tensor.zero is not None
    middle = 1 << (tensor.scheme.bits - 1)
    if not bool((low.zero == middle).all()):
        raise CheckpointError(
            f"{tensor.zero.name} has zero points other than {middle}, although "
            "quantization_config declares the scheme symmetric; --quantization none accepts them"
        )
    return low.q if tensor.scheme.bits == 4 else (low.q ^ middle).view(torch.int8)
