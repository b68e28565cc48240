"""Tensors of a quantized checkpoint -> the weights that the model needs.

Between checkpoint.py and load.py: several tensors (packed bits, scales, zero points) become one
`QuantizedTensor` under the parameter's own name, which is read like a plain tensor. Names, layouts,
merges and passes therefore do not depend on the format.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch

from llmc.errors import CheckpointError
from llmc.weights.checkpoint import Readable, StoredTensor
from llmc.weights.quantized.config_fields import ALL
from llmc.weights.quantized.quantization_config import StoredQuantization, WeightScheme
from llmc.weights.quantized.quantized_tensor import BYTE_SCALES, Codes, NestedScale, QuantizedTensor
from llmc.weights.quantized.stored_shapes import (
    FLOATS,
    INDICES,
    block_of,
    check_kind,
    check_scale,
    check_shape,
    plain_name,
)

log = logging.getLogger(__name__)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.int8, *_FLOAT8)
_TORCHAO = {
    "qdata": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point",
}  # fmt: skip
# Name suffixes. Activations have dynamic scales, if any, and the KV cache has its own options.
_OF_ACTIVATIONS = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)
_OF_WEIGHTS = ("weight_scale", "weight_scale_inv")  # these may be float8
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_OF_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")


def dequantized(
    tensors: Mapping[str, StoredTensor], quantization: StoredQuantization | None, dtype: torch.dtype
) -> dict[str, Readable]:
    """The weights by name; quantized ones will be read in `dtype`.

    Raises CheckpointError for tensors that are missing or inconsistent.
    """
    if quantization is None:
        return dict(tensors)
    if quantization.method == "torchao":
        tensors = _renamed(tensors)
    finder = _Finder(tensors, quantization, dtype)
    found = finder.find()
    if quantization.quantizes_activations:
        _log_once(
            f"{quantization.method} quantizes activations too; llmc does so for fp8 weights only, "
            "with --activation-bits 8"
        )
    if scaled := next((n for n in finder.left if n.endswith(".pre_quant_scale")), None):
        raise CheckpointError(
            f"{scaled} scales the inputs of a quantized linear, which is not supported; use "
            "another quantization of the model, or its original checkpoint"
        )
    unused = {n for n in finder.left if n.rpartition(".")[2] in _OF_ACTIVATIONS}
    of_cache = {n for n in finder.left if n.rpartition(".")[2] in _OF_CACHE}
    if of_cache:
        _log_once(f"{len(of_cache)} KV cache scales in the checkpoint are not used")
    plain = {n: t for n, t in finder.left.items() if n not in unused | of_cache}
    if not found:
        log.warning("config.json says %s, but no weight is quantized", quantization.method)
    return {**plain, **found}


def _renamed(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """torchao's parts of a weight under the names that compressed-tensors gives to its own."""
    found = {}
    for name, tensor in tensors.items():
        module, is_part, part = name.rpartition("._weight_")
        if is_part and part not in _TORCHAO or part == "qdata" and tensor.dtype not in _BYTES:
            raise CheckpointError(
                f"{name} is {plain_name(tensor.dtype)}: of torchao's formats llmc reads those with "
                "a value in each byte (int8, float8); use another quantization of the model, or "
                "its original checkpoint"
            )
        found[f"{module}.{_TORCHAO[part]}" if is_part else name] = tensor
    return dict(sorted(found.items()))  # weights before their scales


@cache
def _log_once(message: str) -> None:
    """Log a message once, however often a checkpoint is opened."""
    log.info("%s", message)


class _Finder:
    """Removes the tensors of quantized weights from `left` and combines them."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        quantization: StoredQuantization,
        dtype: torch.dtype,
    ) -> None:
        self.left = dict(tensors)
        self._popped: dict[str, StoredTensor] = {}  # for the scheme being tried
        self._quantization = quantization
        self._dtype = dtype
        self._has_fp4 = any(s.layout == "fp4" for s in quantization.schemes)
        self._has_int8 = any(s.layout == "plain" and not s.is_float for s in quantization.schemes)

    def find(self) -> dict[str, Readable]:
        found: dict[str, Readable] = {}
        for name, tensor in list(self.left.items()):
            if name in self.left and (one := self._one(name, tensor)) is not None:
                found[one.name] = one
        return found

    def _one(self, name: str, tensor: StoredTensor) -> QuantizedTensor | None:
        module, _, last = name.rpartition(".")
        if last == "qweight":
            if any(s.layout == "awq_gemv" for s in self._quantization.schemes):
                return self._fitting(self._gemv, module, name, "awq_gemv")
            return self._fitting(self._in_words, module, name, "gptq", "awq")
        if last == "weight_packed":
            if tensor.dtype == torch.uint8:
                return self._fitting(self._fp4, module, name, "fp4")
            return self._fitting(self._packed, module, name, "packed")
        if self._quantization.method == "bitsandbytes":
            if any(name + suffix in self.left for suffix in _STATES):
                return self._fitting(self._bnb4, module, name, "bnb4")
            if last == "weight" and f"{module}.SCB" in self.left:
                return self._fitting(self._bnb8, module, name, "bnb8")
            return None
        if self._quantization.method == "bitnet":
            is_packed = last == "weight" and f"{name}_scale" in self.left
            return self._fitting(self._bitnet, module, name, "bitnet") if is_packed else None
        if f"{name}_scale_2" in self.left:
            return self._fitting(self._fp4, module, name, "fp4")
        if self._quantization.method == "mxfp4":
            if not last.endswith("_blocks"):
                return None
            return self._fitting(self._mxfp4, name.removesuffix("_blocks"), name, "mxfp4")
        if last in (*_OF_ACTIVATIONS, *_OF_CACHE, *_OF_WEIGHTS):
            return None  # zero points among them are int8 as weights are
        if tensor.dtype in (torch.int8, torch.uint8) and last == "weight" and self._has_fp4:
            return self._fitting(self._fp4, module, name, "fp4")
        if tensor.dtype in _FLOAT8 or (self._has_int8 and tensor.dtype == torch.int8):
            return self._fitting(self._plain, module if last == "weight" else name, name, "plain")
        return None

    def _fitting(
        self,
        make: Callable[[str, str, WeightScheme], QuantizedTensor],
        module: str,
        name: str,
        *layouts: str,
    ) -> QuantizedTensor:
        """The weight, by the first possible scheme that its tensors fit."""
        schemes = self._quantization.schemes_of(module)
        possible = [scheme for scheme in schemes if scheme.layout in layouts]
        if not possible:
            raise CheckpointError(
                f"{name} does not match what quantization_config describes for it "
                f"({self._quantization.method}, {schemes[0].layout}, {schemes[0].bits} bits)"
            )
        if 0 in (shape := self.left[name].shape):
            raise CheckpointError(f"{name} has shape {list(shape)}, so it has no values")
        has_zeros = f"{module}.weight_zero_point" in self.left
        is_float8 = self.left[name].dtype in _FLOAT8
        possible.sort(
            key=lambda scheme: (
                scheme.layout == "plain" and scheme.is_float != is_float8,
                scheme.symmetric == has_zeros,
            )
        )
        problems = []
        for scheme in possible:
            self._popped.clear()
            try:
                return make(module, name, scheme)
            except CheckpointError as e:
                problems.append(e)
                self.left |= self._popped
        raise problems[0]

    def _plain(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        weight = self.left[name]
        if scheme.is_float != (weight.dtype in _FLOAT8) or weight.dtype == torch.uint8:
            want = "float8" if scheme.is_float else "int8"
            raise CheckpointError(f"{name} is {plain_name(weight.dtype)} instead of {want}")
        self._take(name, for_=name)
        scale = self._scale(module, name)
        if len(weight.shape) not in (2, 3):
            raise CheckpointError(
                f"{name} has shape {list(weight.shape)}; a weight has 2 or 3 dimensions"
            )
        channels, depth = weight.shape[-2:]
        block = scheme.block
        if block is None:
            block = block_of(scale, channels, depth)
        elif scale.shape[:1] == (channels,) and block == (ALL, ALL):
            block = (1, ALL)  # layers merged by a quantizer
        block = (block[0] or channels, block[1] or depth)
        check_scale(scale, weight, block)
        zero = self._pop(f"{name}_zero_point")
        if zero is not None and scheme.symmetric:
            zero = None  # all of them are 0
        elif zero is not None:
            check_scale(zero, weight, block, (torch.int8,))
        return QuantizedTensor(
            name=name,
            shape=weight.shape,
            dtype=self._dtype,
            scheme=scheme,
            block=block,
            weight=weight,
            scale=scale,
            zero=zero,
        )

    def _packed(self, module: str, _: str, scheme: WeightScheme) -> QuantizedTensor:
        name = f"{module}.weight"
        weight = self._take(f"{name}_packed", for_=name)
        scale = self._take(f"{name}_scale", for_=name)
        per_word = 32 // scheme.bits
        check_kind(weight, 2, torch.int32)
        channels, depth = weight.shape[0], weight.shape[1] * per_word
        stated = self._pop(f"{name}_shape")
        if stated is not None:
            check_shape(stated, (2,), *INDICES)
            given = stated.read().tolist()
            if given[0] != channels or math.ceil(given[1] / per_word) != weight.shape[1]:
                raise CheckpointError(
                    f"{weight.name} has shape {list(weight.shape)} with {scheme.bits} bits per "
                    f"value, but {stated.name} says {given}"
                )
            depth = given[1]
        assert scheme.block is not None
        block = (scheme.block[0] or channels, scheme.block[1] or depth)
        groups = self._pop(f"{name}_g_idx")
        zero = None
        check_scale(scale, weight, block, shape=(channels, depth))
        if not scheme.symmetric:
            zero = self._take(f"{name}_zero_point", for_=name)
            rows = math.ceil(channels / block[0])
            want = (math.ceil(rows / per_word), math.ceil(depth / block[1]))
            check_shape(zero, want, torch.int32)
        else:
            self._pop(f"{name}_zero_point")
        if groups is not None:
            check_shape(groups, (depth,), *INDICES)
        return QuantizedTensor(
            name=name,
            shape=(channels, depth),
            dtype=self._dtype,
            scheme=scheme,
            block=block,
            weight=weight,
            scale=scale,
            zero=zero,
            group_of=groups,
        )

    def _fp4(self, module: str, stored: str, scheme: WeightScheme) -> QuantizedTensor:
        """Two numbers per byte along the inputs. Groups of 16 have float8 scales and the whole
        weight has another; groups of 32 have powers of two."""
        name = f"{module}.weight"
        weight = self._take(stored, for_=name)
        scale = self._scale(module, name)
        check_kind(weight, 2, torch.int8 if weight.dtype == torch.int8 else torch.uint8)
        channels, depth = weight.shape[0], 2 * weight.shape[1]
        assert scheme.block is not None
        kinds = (torch.float8_e4m3fn,) if scheme.block[1] == 16 else BYTE_SCALES
        check_scale(scale, weight, scheme.block, kinds, (channels, depth))
        whole = None
        if scheme.block[1] == 16:
            suffix = "global_scale" if scheme.divides else "scale_2"
            whole = self._take(f"{name}_{suffix}", for_=name)
            if math.prod(whole.shape) != 1 or whole.dtype not in FLOATS:
                raise CheckpointError(
                    f"{whole.name} is {plain_name(whole.dtype)} of shape {list(whole.shape)}; it "
                    "must be one number"
                )
        return QuantizedTensor(
            name=name,
            shape=(channels, depth),
            dtype=self._dtype,
            scheme=scheme,
            block=scheme.block,
            weight=weight,
            scale=scale,
            whole_scale=whole,
        )

    def _bnb4(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        """Codes of a table, two per byte, and a scale for every 64 (or so) of them in a row. Scales
        may be codes of another table themselves."""
        state = next(self._take(name + s, for_=name) for s in _STATES if name + s in self.left)
        check_kind(state, 1, torch.uint8)
        try:
            fields = json.loads(bytes(state.read().tolist()))
            channels, depth = fields["shape"]
            size, nested = fields["blocksize"], fields.get("nested_blocksize") or 0
            offset = float(fields.get("nested_offset") or 0.0)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise CheckpointError(f"{state.name} can't be read: {e!r:.100}") from e
        if not all(type(n) is int and n > 0 for n in (channels, depth, size, nested or 1)):
            raise CheckpointError(f"{state.name} has sizes that are not positive numbers")
        weight = self._take(name, for_=name)
        # bnb_4bit_quant_storage: the bytes can be stored as numbers of any dtype.
        weight = replace(weight, dtype=torch.uint8, shape=(weight.num_bytes, 1))
        scale = self._take(f"{name}.absmax", for_=name)
        table = self._take(f"{name}.quant_map", for_=name)
        count, values = math.ceil(channels * depth / size), channels * depth
        if weight.num_bytes != (values + 1) // 2:
            raise CheckpointError(
                f"{name} has {weight.num_bytes} bytes, but {channels} by {depth} values in 4 bits "
                f"take {(values + 1) // 2} bytes"
            )
        check_shape(scale, (count,), torch.uint8 if nested else torch.float32)
        check_shape(table, (16,), torch.float32)
        nest = None
        if nested:
            scales = self._take(f"{name}.nested_absmax", for_=name)
            codes = self._take(f"{name}.nested_quant_map", for_=name)
            check_shape(scales, (math.ceil(count / nested),), torch.float32)
            check_shape(codes, (256,), torch.float32)
            nest = NestedScale(scale=scales, table=codes, size=nested, offset=offset)
        rows = size // depth if size % depth == 0 else 1
        return QuantizedTensor(
            name=name,
            shape=(channels, depth),
            dtype=self._dtype,
            scheme=scheme,
            block=(rows, depth) if rows > 1 else (1, size if depth % size == 0 else 1),
            weight=weight,
            scale=scale,
            codes=Codes(table=table, size=size, nested=nest),
        )

    def _bnb8(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        weight = self._take(name, for_=name)
        scale = self._take(f"{module}.SCB", for_=name)
        self._pop(f"{module}.weight_format")
        check_kind(weight, 2, torch.int8)
        channels, depth = weight.shape
        check_shape(scale, (channels,), torch.float32, torch.float16)
        return QuantizedTensor(
            name=name,
            shape=weight.shape,
            dtype=self._dtype,
            scheme=scheme,
            block=(1, depth),
            weight=weight,
            scale=scale,
        )

    def _bitnet(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        weight = self._take(name, for_=name)
        scale = self._take(f"{name}_scale", for_=name)
        check_kind(weight, 2, torch.uint8)
        shape = 4 * weight.shape[0], weight.shape[1]
        check_scale(scale, weight, shape, FLOATS, shape)
        return QuantizedTensor(
            name=name,
            shape=shape,
            dtype=self._dtype,
            scheme=scheme,
            block=shape,
            weight=weight,
            scale=scale,
        )

    def _in_words(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        """A gptq or awq weight: gptq packs inputs of a channel into a word, awq packs channels."""
        weight, scale, zero = self._words(module, name)
        groups = self._pop(f"{module}.g_idx")
        depth, channels = weight.shape
        if scheme.layout == "gptq":
            if depth * 32 % scheme.bits:
                raise CheckpointError(
                    f"{name} has shape {list(weight.shape)}, and {depth} words hold no whole "
                    f"number of values of {scheme.bits} bits"
                )
            depth = depth * 32 // scheme.bits
        else:
            channels = channels * 32 // scheme.bits
        assert scheme.block is not None
        group = scheme.block[1] or depth
        count = math.ceil(depth / group)
        check_shape(scale, (count, channels), *FLOATS)
        unit = 32 // math.gcd(32, scheme.bits)  # values in the fewest whole words
        words = math.ceil(channels / unit) * unit * scheme.bits // 32
        check_shape(zero, (count, words), torch.int32)
        if groups is not None:
            check_shape(groups, (depth,), *INDICES)
        return QuantizedTensor(
            name=f"{module}.weight",
            shape=(channels, depth),
            dtype=self._dtype,
            scheme=scheme,
            block=(1, group),
            weight=weight,
            scale=scale,
            zero=zero,
            group_of=groups,
        )

    def _words(self, module: str, name: str) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
        """A weight in words of 32 bits, its scales and its zero points."""
        weight = self._take(name, for_=name)
        scale = self._take(f"{module}.scales", for_=name)
        zero = self._take(f"{module}.qzeros", for_=name)
        check_kind(weight, 2, torch.int32)
        return weight, scale, zero

    def _gemv(self, module: str, name: str, scheme: WeightScheme) -> QuantizedTensor:
        """Inputs of a channel in a word. Scales and zero points are padded to the width that the
        tool's kernels read."""
        weight, scale, zero = self._words(module, name)
        check_kind(zero, 2, torch.int32)
        channels, depth = weight.shape[0], weight.shape[1] * 8
        assert scheme.block is not None
        group = scheme.block[1] or depth
        width = zero.shape[-1]
        if depth % group or 8 * width < depth // group:
            raise CheckpointError(
                f"{zero.name} has shape {list(zero.shape)}, but {depth} inputs have "
                f"{depth / group:g} groups of {group}"
            )
        check_shape(zero, (channels, width))
        check_shape(scale, (channels, 8 * width), *FLOATS)
        return QuantizedTensor(
            name=f"{module}.weight",
            shape=(channels, depth),
            dtype=self._dtype,
            scheme=scheme,
            block=(1, group),
            weight=weight,
            scale=scale,
            zero=zero,
        )

    def _mxfp4(self, name: str, blocks: str, scheme: WeightScheme) -> QuantizedTensor:
        weight = self._take(blocks, for_=name)
        scale = self._take(f"{name}_scales", for_=name)
        check_kind(weight, 4, torch.uint8)
        experts, channels, groups, half = weight.shape
        if half != 16:
            raise CheckpointError(
                f"{blocks} has shape {list(weight.shape)}: a block of mxfp4 is 16 bytes, 32 inputs"
            )
        check_shape(scale, (experts, channels, groups), *BYTE_SCALES)
        return QuantizedTensor(
            name=name,
            shape=(experts, groups * 32, channels),
            dtype=self._dtype,
            scheme=scheme,
            block=(1, 32),
            weight=weight,
            scale=scale,
            transposed=True,
        )

    def _scale(self, module: str, name: str) -> StoredTensor:
        """The scale of a weight, under one of its usual names."""
        usual = f"{name}_scale_inv", f"{name}_scale", f"{module}.scale", f"{module}.qscale_weight"
        known = [n for n in usual if n in self.left]
        return self._take(known[0] if known else f"{name}_scale", for_=name)

    def _take(self, name: str, *, for_: str) -> StoredTensor:
        if (found := self._pop(name)) is None:
            raise CheckpointError(f"{for_} is stored quantized, but {name} is missing")
        return found

    def _pop(self, name: str) -> StoredTensor | None:
        found = self.left.pop(name, None)
        if found is not None:
            self._popped[name] = found
        return found
