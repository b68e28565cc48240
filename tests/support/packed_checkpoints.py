"""Quantized checkpoints, packed here bit by bit according to the layouts' descriptions.

Deliberately different from llmc's reader: numpy, one bit position at a time. Each packer returns
the stored tensors of one linear and its dequantized values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmc.weights.checkpoint import open_checkpoint
from llmc.weights.quantized.quantization_config import read_quantization
from llmc.weights.quantized.stored_weights import dequantized

Packed = tuple[dict[str, Tensor], Tensor]  # by suffix of the module's name; the weight in float32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MODULE = "model.layers.0.mlp.up_proj"  # the name of a linear that is stored alone
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of a word's i-th four bits


@dataclass(frozen=True, kw_only=True)
class Packing:
    """`config` is the quantization_config, `pack` creates a linear's tensors."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    plain: tuple[str, ...] = ("lm_head",)
    extra: dict[str, Tensor] = field(default_factory=dict)


def words_of(values: np.ndarray, bits: int, axis: int) -> Tensor:
    """Pack unsigned integers into int32 words along an axis, the first in the lowest bits. Of 3
    bits, a word begins with the bits that the word before had no room for."""
    values = np.moveaxis(values.astype(np.uint64), axis, -1)
    unit = 32 if bits == 3 else 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[-1] % unit)))
    words = np.zeros((values.shape[0], values.shape[-1] * bits // 32), dtype=np.uint64)
    for i in range(values.shape[-1]):
        for bit in range(bits):
            word, at = divmod(i * bits + bit, 32)
            words[:, word] |= (values[:, i] >> np.uint64(bit) & np.uint64(1)) << np.uint64(at)
    packed = np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(packed))


def integers(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    scale_dtype: torch.dtype = torch.float16,
    group_of: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """(q [N, K], zero [N, G], scale [N, G], numbers [N, K]) of unsigned integers."""
    rows = weight.double().numpy()
    channels, depth = rows.shape
    group = group if group > 0 else depth
    if group_of is None:
        group_of = np.arange(depth) // group
    count, top = int(group_of.max()) + 1, 2**bits - 1
    zero = np.full((channels, count), 2 ** (bits - 1))
    scale = np.zeros((channels, count))
    for g in range(count):
        some = rows[:, group_of == g]
        low, high = np.minimum(some.min(1), 0), np.maximum(some.max(1), 0)
        if symmetric:
            scale[:, g] = np.maximum(-low, high) / (2 ** (bits - 1) - 0.5)
        else:
            scale[:, g] = (high - low) / top
            zero[:, g] = np.clip(np.rint(-low / scale[:, g]), 0, top)
    stored = torch.from_numpy(scale).to(scale_dtype)
    wide = stored.double().numpy()[:, group_of]
    q = np.clip(np.rint(rows / wide) + zero[:, group_of], 0, top).astype(np.int64)
    numbers = (q - zero[:, group_of]) * wide
    return q, zero, stored, torch.from_numpy(numbers).float()


def gptq(
    bits: int, group: int, *, v2: bool = False, order: bool = False, symmetric: bool = False
) -> Packing:
    """GPTQModel: inputs along words, zero points one less in the first version."""

    def pack(weight: Tensor) -> Packed:
        depth = weight.shape[1]
        size = group if group > 0 else depth
        group_of = np.arange(depth) // size
        if order:
            group_of = np.random.default_rng(depth).permutation(group_of)
        q, zero, scale, numbers = integers(
            weight, bits, group, symmetric=symmetric, group_of=group_of
        )
        zeros = words_of(zero.T, bits, 1)
        if not v2 and bits == 3:
            zeros = words_of((zero.T - 1) & 7, bits, 1)
        elif not v2:  # subtracted from whole words: a value of 0 borrows from the next
            ones = np.uint32(sum(1 << i for i in range(0, 32, bits)))
            zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - ones).view(np.int32))
        return {
            "qweight": words_of(q.T, bits, 0),
            "qzeros": zeros,
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, numbers

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order,
        "sym": symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Packing(config=config, pack=pack)


def awq(group: int) -> Packing:
    """AutoAWQ's gemm: channels along words, interleaved."""

    def pack(weight: Tensor) -> Packed:
        q, zero, scale, numbers = integers(weight, 4, group, symmetric=False)

        def interleaved(values: np.ndarray) -> Tensor:
            order = np.arange(values.shape[1]).reshape(-1, 8)[:, _AWQ_ORDER].reshape(-1)
            return words_of(values[:, order], 4, 1)

        return {
            "qweight": interleaved(q.T),
            "qzeros": interleaved(zero.T),
            "scales": scale.T.contiguous(),
        }, numbers

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Packing(config=config, pack=pack)


def awq_gemv(group: int) -> Packing:
    """AutoAWQ's gemv: inputs along words, and groups padded to the width that its kernels read."""

    def pack(weight: Tensor) -> Packed:
        q, zero, scale, numbers = integers(weight, 4, group, symmetric=False)
        words = -(-scale.shape[1] // 8)
        words += -words % max(1, 128 // group)
        more = 8 * words - scale.shape[1]
        return {
            "qweight": words_of(q, 4, 1),
            "qzeros": words_of(np.pad(zero, ((0, 0), (0, more))), 4, 1),
            "scales": torch.nn.functional.pad(scale, (0, more)).contiguous(),
        }, numbers

    return Packing(config={**awq(group).config, "version": "gemv"}, pack=pack)


def compressed(
    form: str, weights: dict[str, Any], pack: Callable[[Tensor], Packed], **group: Any
) -> Packing:
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"dynamic": False, "symmetric": True, **weights},
                "input_activations": None,
                "output_activations": None,
                **group,
            }
        },
    }
    return Packing(config=config, pack=pack)


def pack_quantized(bits: int, group: int, *, symmetric: bool, order: bool = False) -> Packing:
    """compressed-tensors: inputs along words, zero points of channels along words."""

    def pack(weight: Tensor) -> Packed:
        depth = weight.shape[1]
        group_of = np.arange(depth) // (group if group > 0 else depth)
        if order:
            group_of = np.random.default_rng(depth).permutation(group_of)
        q, zero, scale, numbers = integers(
            weight, bits, group, symmetric=symmetric, scale_dtype=torch.bfloat16, group_of=group_of
        )
        tensors = {
            "weight_packed": words_of(q, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zero, bits, 0)
        if order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, numbers

    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    weights |= {"actorder": "group"} if order else {}
    return compressed("pack-quantized", weights, pack)


def int_quantized(bits: int = 8) -> Packing:
    """A byte per value, whatever the bits."""

    def pack(weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / ((1 << bits - 1) - 1)
        q = (weight / scale).round().to(torch.int8)
        return {"weight": q, "weight_scale": scale}, q.float() * scale

    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
    return compressed("int-quantized", weights, pack, input_activations=inputs)


def float8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(fp8 [N, K], scale over a grid of blocks, numbers)."""
    channels, depth = weight.shape
    rows, columns = -(-channels // block[0]), -(-depth // block[1])
    scale, q = torch.zeros(rows, columns), torch.zeros(channels, depth)
    numbers = torch.zeros(channels, depth)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = weight[at].abs().max() / 448
            low = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn).float()
            q[at], numbers[at] = low, low * scale[i, j]
    return q.to(torch.float8_e4m3fn), scale, numbers


def fp8(block: tuple[int, int] | None) -> Packing:
    """Blocks as in current `fp8` checkpoints; None: one scale per tensor, as in older ones."""

    def pack(weight: Tensor) -> Packed:
        q, scale, numbers = float8(weight, block or (1 << 20, 1 << 20))
        if block is None:
            return {
                "weight": q,
                "weight_scale": scale.reshape(()),
                "input_scale": torch.tensor(0.5),
            }, numbers
        return {"weight": q, "weight_scale_inv": scale}, numbers

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
    if block is not None:
        config |= {"activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Packing(config=config, pack=pack)


def fbgemm() -> Packing:
    def pack(weight: Tensor) -> Packed:
        q, scale, numbers = float8(weight, (1, 1 << 20))
        return {"weight": q, "weight_scale": scale}, numbers

    config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
    return Packing(config=config, pack=pack)


def float_quantized(strategy: str) -> Packing:
    block = {"tensor": (1 << 20, 1 << 20), "channel": (1, 1 << 20), "block": (32, 48)}[strategy]

    def pack(weight: Tensor) -> Packed:
        q, scale, numbers = float8(weight, block)
        scale = scale.bfloat16()
        numbers = (
            q.float()
            * scale.float()
            .repeat_interleave(min(block[0], len(q)), 0)[: len(q)]
            .repeat_interleave(min(block[1], q.shape[1]), 1)[:, : q.shape[1]]
        )
        return {"weight": q, "weight_scale": scale[0] if strategy == "tensor" else scale}, numbers

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = list(block)
    return compressed("float-quantized", weights, pack)


def e2m1(rows: np.ndarray) -> np.ndarray:
    """The nearest codes of numbers, already divided by their scales."""
    sizes = np.abs(np.abs(rows)[..., None] - np.array(_E2M1)).argmin(-1)
    return sizes | np.signbit(rows) * 8


def nvfp4(*, modelopt: bool = False) -> Packing:
    """Groups of 16 with e4m3 scales, which a factor or a divisor of the whole weight scales."""

    def pack(weight: Tensor) -> Packed:
        whole = float(weight.abs().max()) / (448 * 6)
        groups = weight.double().view(len(weight), -1, 16)
        scale = (groups.abs().amax(-1) / 6 / whole).float().to(torch.float8_e4m3fn)
        if modelopt:
            stored_whole = torch.tensor(whole)
            factor = scale.double() * stored_whole.double()
        else:
            stored_whole = torch.tensor([1 / whole])
            factor = scale.double() / stored_whole.double()
        codes = e2m1((groups / factor[..., None]).numpy())
        signed = np.where(codes & 8, -1, 1) * np.array(_E2M1)[codes & 7]
        numbers = torch.from_numpy(signed) * factor[..., None]
        codes = codes.reshape(len(weight), -1)
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        names = (
            ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
        )
        return {
            names[0]: packed,
            "weight_scale": scale,
            names[1]: stored_whole,
            "input_scale" if modelopt else "input_global_scale": torch.tensor([0.5]),
        }, numbers.reshape(weight.shape).float()

    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]}
        return Packing(config=config, pack=pack)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs = {**weights, "dynamic": "local"}
    return compressed("nvfp4-pack-quantized", weights, pack, input_activations=inputs)


def mxfp4_linear() -> Packing:
    def pack(weight: Tensor) -> Packed:
        parts, numbers = mxfp4(weight.T[None])
        codes = parts["_blocks"][0].flatten(1)
        return {"weight_packed": codes, "weight_scale": parts["_scales"][0]}, numbers[0].T

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return compressed("mxfp4-pack-quantized", weights, pack)


def mxfp8() -> Packing:
    def pack(weight: Tensor) -> Packed:
        groups = weight.double().view(len(weight), -1, 32)
        exponent = (groups.abs().amax(-1).log2().floor() - 8).int()
        q = (groups / 2.0 ** exponent[..., None].double()).float()
        q = q.clamp(-448, 448).to(torch.float8_e4m3fn)  # torch 2.11 makes NaN of larger numbers
        numbers = q.float() * 2.0 ** exponent[..., None].float()
        return {
            "weight": q.view(weight.shape),
            "weight_scale": (exponent + 127).to(torch.uint8),
        }, numbers.view(weight.shape)

    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    return compressed("mxfp8-quantized", weights, pack)


def auto_round(layout: str) -> Packing:
    made = {
        "auto_gptq": gptq(4, 32, symmetric=True),
        "auto_awq": awq(32),
        "gptqmodel": gptq(4, 32, v2=True),
    }[layout]
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": layout == "auto_gptq",
        "data_type": "int",
        "packing_format": f"auto_round:{layout}",
    }
    return Packing(config=config, pack=made.pack)


def auto_round_floats(bits: int) -> Packing:
    """AutoRound's files of floats: in 4 bits as compressed-tensors', in 8 bits as `fp8`."""
    config: dict[str, Any] = {"quant_method": "auto-round", "bits": bits, "act_bits": bits}
    if bits == 8:
        config |= {"data_type": "fp", "fmt": "e4m3", "weight_block_size": [32, 32]}
        config |= {"packing_format": "auto_round:fp8", "group_size": [32, 32]}
        return Packing(config=config, pack=fp8((32, 32)).pack)
    config |= {"data_type": "nv_fp", "group_size": 16}
    return Packing(
        config=config | {"packing_format": "auto_round:llm_compressor"}, pack=nvfp4().pack
    )


def auto_round_mx(bits: int) -> Packing:
    config = {
        "quant_method": "auto-round",
        "bits": bits,
        "group_size": 32,
        "data_type": "mx_fp",
        "packing_format": "auto_round:llm_compressor",
    }
    return Packing(config=config, pack=(mxfp4_linear() if bits == 4 else mxfp8()).pack)


def quark(dtype: str) -> Packing:
    """Quark's export, with the names of `fp8` for both."""

    def fp4(weight: Tensor) -> Packed:
        parts, numbers = mxfp4_linear().pack(weight)
        return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, numbers

    weight = {"dtype": dtype, "qscheme": "per_group" if dtype == "fp4" else "per_tensor"}
    config = {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight | ({"group_size": 32} if dtype == "fp4" else {}),
            "input_tensors": None,
        },
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }
    return Packing(config=config, pack=fp4 if dtype == "fp4" else fp8(None).pack)


def modelopt(algorithm: str) -> Packing:
    packs = {"mxfp4": quark("fp4").pack, "MXFP8": mxfp8().pack, "W4A16_NVFP4": nvfp4_of_modelopt}
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return Packing(config=config, pack=packs[algorithm])


def nvfp4_of_modelopt(weight: Tensor) -> Packed:
    return nvfp4(modelopt=True).pack(weight)


_NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)


def nf4(*, nested: bool, stored_as: torch.dtype = torch.uint8) -> Packing:
    """bitsandbytes in 4 bits: blocks of 64 in a row, over the ends of channels. `stored_as`:
    bnb_4bit_quant_storage, the dtype in which the bytes are stored."""

    def pack(weight: Tensor) -> Packed:
        flat = weight.flatten()
        count = -(-len(flat) // 64)
        blocks = torch.nn.functional.pad(flat, (0, 64 * count - len(flat))).view(count, 64)
        scale = blocks.abs().amax(1)
        parts: dict[str, Tensor] = {"weight.absmax": scale, "weight.quant_map": torch.tensor(_NF4)}
        state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), float(scale.mean())
            most = torch.stack([one.abs().max() for one in (scale - offset).split(256)])
            each = most.repeat_interleave(256)[:count]
            codes = (((scale - offset) / each)[:, None] - table).abs().argmin(1)
            scale = table[codes] * each + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts["weight.absmax"] = codes.to(torch.uint8)
            parts |= {"weight.nested_absmax": most, "weight.nested_quant_map": table}
        table = torch.tensor(_NF4)
        codes = (blocks[..., None] / scale[:, None, None] - table).abs().argmin(-1).flatten()
        numbers = (table[codes].view(count, 64) * scale[:, None]).flatten()[: len(flat)]
        codes = codes[: len(flat)].to(torch.uint8)
        parts["weight"] = (codes[::2] << 4 | codes[1::2]).view(stored_as)[:, None]
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return parts, numbers.view(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["bnb_4bit_quant_storage"] = str(stored_as).removeprefix("torch.")
    return Packing(config=config, pack=pack)


def bnb_int8() -> Packing:
    def pack(weight: Tensor) -> Packed:
        most = weight.abs().amax(1)
        q = (weight * (127 / most[:, None])).round().to(torch.int8)
        form = torch.tensor(0, dtype=torch.uint8)
        return {"weight": q, "SCB": most, "weight_format": form}, q.float() * (most / 127)[:, None]

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Packing(config=config, pack=pack)


def bitnet(linear: str) -> Packing:
    """Numbers of -1, 0 and 1; the first quarter of the rows in the lowest bits."""

    def pack(weight: Tensor) -> Packed:
        scale = weight.abs().mean()
        q = (weight / scale).round().clamp(-1, 1)
        quarters = (q + 1).to(torch.uint8).view(4, -1, weight.shape[1])
        packed = sum(
            (part << 2 * i for i, part in enumerate(quarters)), torch.zeros_like(quarters[0])
        )
        stored = 1 / scale if linear == "bitlinear" else scale
        numbers = q / stored if linear == "bitlinear" else q * stored
        return {"weight": packed, "weight_scale": stored.reshape(1)}, numbers

    config = {"quant_method": "bitnet", "linear_class": linear, "quantization_mode": "offline"}
    return Packing(config=config, pack=pack)


def torchao(kind: str) -> Packing:
    """Int8Tensor, or IntxUnpackedToInt8Tensor with 4 bits in groups and zero points."""

    def pack(weight: Tensor) -> Packed:
        if kind == "Float8WeightOnlyConfig":
            q, scale, numbers = float8(weight, (1, 1 << 20))
            return {"_weight_qdata": q, "_weight_scale": scale}, numbers
        if kind == "Int8WeightOnlyConfig":
            scale = weight.abs().amax(1, keepdim=True) / 127
            rows = (weight / scale).round()
            zero = torch.zeros_like(scale)
        else:
            groups = weight.unflatten(1, (-1, 32))
            low, high = groups.amin(-1), groups.amax(-1)
            scale = (high - low) / 15
            zero = (-8 - low / scale).round().clamp(-8, 7)
            near = groups / scale[..., None] + zero[..., None]
            rows = near.round().clamp(-8, 7).flatten(1)
        parts = {"_weight_qdata": rows, "_weight_scale": scale, "_weight_zero_point": zero}
        each = weight.shape[1] // scale.shape[1]
        wide = [part.repeat_interleave(each, 1) for part in (zero, scale)]
        stored = {k: v if v is scale else v.to(torch.int8) for k, v in parts.items()}
        return stored, (rows - wide[0]) * wide[1]

    options = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}
    default = {"_type": kind, "_data": options if kind == "IntxWeightOnlyConfig" else {}}
    config = {"quant_method": "torchao", "quant_type": {"default": default}}
    return Packing(config=config, pack=pack)


def modelopt_fp8() -> Packing:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return Packing(config=config, pack=fp8(None).pack)


PACKINGS: dict[str, Callable[[], Packing]] = {
    "fp8 in blocks": lambda: fp8((32, 48)),
    "fp8 in blocks of 32": lambda: fp8((32, 32)),
    "fp8, a scale a tensor": lambda: fp8(None),
    "fbgemm_fp8": fbgemm,
    "float-quantized tensor": lambda: float_quantized("tensor"),
    "float-quantized channel": lambda: float_quantized("channel"),
    "float-quantized block": lambda: float_quantized("block"),
    "int-quantized": int_quantized,
    "int-quantized int4": lambda: int_quantized(4),
    "pack-quantized int4 group": lambda: pack_quantized(4, 32, symmetric=True),
    "pack-quantized int4 asymmetric": lambda: pack_quantized(4, 32, symmetric=False),
    "pack-quantized int4 in another order": lambda: pack_quantized(
        4, 32, symmetric=False, order=True
    ),
    "pack-quantized int4 channel": lambda: pack_quantized(4, -1, symmetric=True),
    "pack-quantized int8 group": lambda: pack_quantized(8, 32, symmetric=True),
    "pack-quantized int8 channel": lambda: pack_quantized(8, -1, symmetric=False),
    "gptq 4 bits": lambda: gptq(4, 32),
    "gptq 8 bits": lambda: gptq(8, 64),
    "gptq 4 bits, all inputs": lambda: gptq(4, -1),
    "gptq 2 bits": lambda: gptq(2, 32),
    "gptq 2 bits, symmetric": lambda: gptq(2, 32, symmetric=True),
    "gptq 3 bits": lambda: gptq(3, 32),
    "gptq_v2 3 bits, symmetric": lambda: gptq(3, 32, v2=True, symmetric=True),
    "gptq_v2": lambda: gptq(4, 32, v2=True),
    "gptq in another order": lambda: gptq(4, 32, order=True),
    "awq": lambda: awq(32),
    "awq for gemv": lambda: awq_gemv(32),
    "nvfp4": nvfp4,
    "nvfp4 of modelopt": lambda: nvfp4(modelopt=True),
    "fp8 of modelopt": modelopt_fp8,
    "mxfp4 of modelopt": lambda: modelopt("mxfp4"),
    "mxfp8 of modelopt": lambda: modelopt("MXFP8"),
    "nvfp4 of modelopt, weights only": lambda: modelopt("W4A16_NVFP4"),
    "fp8 of quark": lambda: quark("fp8_e4m3"),
    "mxfp4 of quark": lambda: quark("fp4"),
    "mxfp4": mxfp4_linear,
    "mxfp8": mxfp8,
    "auto-round as gptq": lambda: auto_round("auto_gptq"),
    "auto-round as awq": lambda: auto_round("auto_awq"),
    "auto-round as gptqmodel": lambda: auto_round("gptqmodel"),
    "auto-round, fp8": lambda: auto_round_floats(8),
    "auto-round, nvfp4": lambda: auto_round_floats(4),
    "auto-round, mxfp4": lambda: auto_round_mx(4),
    "auto-round, mxfp8": lambda: auto_round_mx(8),
    "bitnet": lambda: bitnet("autobitlinear"),
    "bitnet with divisors": lambda: bitnet("bitlinear"),
    "nf4": lambda: nf4(nested=False),
    "nf4 with nested scales": lambda: nf4(nested=True),
    "nf4 stored as bfloat16": lambda: nf4(nested=False, stored_as=torch.bfloat16),
    "bitsandbytes in 8 bits": bnb_int8,
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4 in bytes": lambda: torchao("IntxWeightOnlyConfig"),
}


def mxfp4(weight: Tensor) -> Packed:
    """Stacked experts [E, K, N]: two values per byte along K, in blocks of 32, channels first."""
    rows = weight.transpose(1, 2).double().numpy()
    experts, channels, depth = rows.shape
    blocks = rows.reshape(experts, channels, depth // 32, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    signs, sizes = np.signbit(blocks), np.abs(blocks) / 2 ** exponent[..., None]
    codes = np.abs(sizes[..., None] - np.array(_E2M1)).argmin(-1)
    numbers = np.where(signs, -1, 1) * np.array(_E2M1)[codes] * 2 ** exponent[..., None]
    codes = codes | signs * 8
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return {
        "_blocks": torch.from_numpy(packed),
        "_scales": torch.from_numpy((exponent + 127).astype(np.uint8)),
    }, torch.from_numpy(numbers.reshape(experts, channels, depth)).float().transpose(1, 2)


def write_packed(plain: Path, out: Path, packing: Packing) -> tuple[Path, Path]:
    """Write the checkpoint `plain` with packed linears, and again with the dequantized values."""

    def is_linear(name: str, tensor: Tensor) -> bool:
        kept = any(name.startswith(p) for p in packing.plain) or "embed" in name or ".gate." in name
        return name.endswith(".weight") and tensor.dim() == 2 and not kept

    tensors = load_file(plain / "model.safetensors")
    packed, numbers = dict(packing.extra), {}
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            parts, numbers[name] = packing.pack(tensor)
            module = name.removesuffix(".weight")
            packed |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            packed[name] = numbers[name] = tensor
    return _write(plain, out, packing.config, packed, numbers)


def write_mxfp4(plain: Path, out: Path) -> tuple[Path, Path]:
    tensors = load_file(plain / "model.safetensors")
    packed, numbers = {}, {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, numbers[name] = mxfp4(tensor)
            packed |= {f"{name}{suffix}": part for suffix, part in parts.items()}
        else:
            packed[name] = numbers[name] = tensor
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return _write(plain, out, config, packed, numbers)


def _write(
    plain: Path,
    out: Path,
    quantization: dict[str, Any],
    packed: dict[str, Tensor],
    numbers: dict[str, Tensor],
) -> tuple[Path, Path]:
    config = json.loads((plain / "config.json").read_text())
    stored, wide = out / "stored", out / "wide"
    for path, tensors in ((stored, packed), (wide, numbers)):
        path.mkdir(parents=True)
        for file in plain.glob("*.json"):
            shutil.copy(file, path)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return stored, wide


def drawn(channels: int = 56, depth: int = 96) -> Tensor:
    weight = torch.randn(channels, depth, generator=torch.Generator().manual_seed(0))
    weight[3:6] = weight[3:6].abs()  # their zero points are 0
    return weight


def read_stored(path: Path, tensors: dict[str, Tensor], config: Any, dtype: torch.dtype) -> Any:
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    quantization = read_quantization({"quantization_config": config})
    return dequantized(open_checkpoint(path), quantization, dtype)


def store_one(
    path: Path, packing: Packing, weight: Tensor, dtype: torch.dtype = torch.float32
) -> Any:
    tensors, numbers = packing.pack(weight)
    named = {f"{MODULE}.{suffix}": t for suffix, t in tensors.items()}
    return read_stored(path, named, packing.config, dtype), numbers
