"""Stored bits in the blocks of `quantized_linear`: the same numbers, to the last bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import MODULE, PACKINGS, drawn, gptq, mxfp4, store_one
from safetensors.torch import save_file
from torch import nn

from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import Quantization, Scale, dequantize
from llmc.weights.checkpoint import SomeOf, open_checkpoint, open_file
from llmc.weights.quantized.kept_quantized import blocks_of, expected_weights, kept_weights
from llmc.weights.quantized.quantization_config import read_quantization
from llmc.weights.quantized.quantized_tensor import QuantizedTensor
from llmc.weights.quantized.stored_weights import dequantized

INT4 = Quantization(format="int4", group=32, scale="float16", zero=True)
MXFP4 = Quantization(format="mxfp4", group=32, scale="exponent")
NVFP4 = Quantization(format="nvfp4", group=16)
# Of a weight of 48 channels and 96 inputs; the others are widened.
KEPT = {
    "fp8 in blocks of 32": Quantization(format="fp8", group=32),
    "fp8, a scale a tensor": Quantization(format="fp8"),
    "fbgemm_fp8": Quantization(format="fp8"),
    "float-quantized tensor": Quantization(format="fp8"),
    "float-quantized channel": Quantization(format="fp8"),
    "int-quantized": Quantization(format="int8"),
    "int-quantized int4": Quantization(format="int4", group=32),
    "pack-quantized int4 group": Quantization(format="int4", group=32, scale="bfloat16"),
    "pack-quantized int4 asymmetric": Quantization(
        format="int4", group=32, scale="bfloat16", zero=True
    ),
    "pack-quantized int4 channel": Quantization(format="int4", group=32, scale="bfloat16"),
    "pack-quantized int8 group": Quantization(format="int8", group=32),
    "gptq 4 bits": INT4,
    "gptq 4 bits, all inputs": INT4,
    "gptq 2 bits": INT4,
    "gptq 2 bits, symmetric": INT4,
    "gptq 3 bits": INT4,
    "gptq_v2 3 bits, symmetric": INT4,
    "gptq_v2": INT4,
    "awq": INT4,
    "awq for gemv": INT4,
    "fp8 of modelopt": Quantization(format="fp8"),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "nvfp4 of modelopt": NVFP4,
    "nvfp4 of modelopt, weights only": NVFP4,
    "auto-round, nvfp4": NVFP4,
    "bitsandbytes in 8 bits": Quantization(format="int8"),
    "auto-round as gptq": Quantization(format="int4", group=32, scale="float16"),
    "auto-round as awq": INT4,
    "auto-round as gptqmodel": INT4,
    "bitnet": Quantization(format="int8"),
    "bitnet with divisors": Quantization(format="int8"),
    "mxfp8": Quantization(format="fp8", group=32),
    "torchao float8": Quantization(format="fp8"),
    "torchao int8": Quantization(format="int8"),
    "torchao int4 in bytes": Quantization(format="int4", group=32, zero=True),
    "mxfp4 of modelopt": MXFP4,
    "mxfp8 of modelopt": Quantization(format="fp8", group=32),
    "fp8 of quark": Quantization(format="fp8"),
    "mxfp4 of quark": MXFP4,
    "auto-round, fp8": Quantization(format="fp8", group=32),
    "auto-round, mxfp4": MXFP4,
    "auto-round, mxfp8": Quantization(format="fp8", group=32),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_numbers_stay_the_same(name: str, tmp_path: Path) -> None:
    found, numbers = store_one(tmp_path, PACKINGS[name](), drawn(48, 96))
    tensor = found[f"{MODULE}.weight"]
    if name not in KEPT:
        assert kept_weights(found) == () or "in another order" in name
        return
    assert kept_weights(found) == ((f"{MODULE}.weight", KEPT[name]),)
    (parts,) = blocks_of(tensor, KEPT[name])
    for part, made in parts.items():
        assert made.shape == KEPT[name].shape(part, 48, 96)
        assert made.dtype == KEPT[name].dtypes[part] and made.is_contiguous()
    assert torch.equal(dequantize(**parts), tensor.read())
    torch.testing.assert_close(dequantize(**parts), numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tool", ["gptq", "pack-quantized int4"])
def test_inputs_in_another_order_are_put_together(tool: str, tmp_path: Path) -> None:
    packing = PACKINGS[f"{tool} in another order"]
    found, numbers = store_one(tmp_path, packing(), drawn(48, 96))
    tensor = found[f"{MODULE}.weight"]
    assert isinstance(tensor, QuantizedTensor)
    ((_, to),) = kept_weights(found)
    scale: Scale = "float16" if tool == "gptq" else "bfloat16"
    assert to == dataclasses.replace(INT4, scale=scale, order=to.order) and to.order
    some = SomeOf(shape=tensor.shape, dim=0, ranges=((16, 16),))
    for part, want in ((None, numbers), (some, some.of(numbers))):
        (parts,) = blocks_of(tensor, to, part)
        assert {p: made.dtype for p, made in parts.items()} == to.dtypes
        assert all(made.shape == to.shape(p, *want.shape) for p, made in parts.items())
        order = parts.pop("order").long()
        assert torch.equal(order.sort().values, torch.arange(96))
        torch.testing.assert_close(dequantize(**parts), want[:, order], rtol=1e-6, atol=0)
    other, _ = store_one(tmp_path, packing(), drawn(16, 96))
    assert kept_weights(other) == ((f"{MODULE}.weight", to),), "the same order of as many inputs"
    assert tensor.group_of is not None
    uneven = torch.arange(96, dtype=torch.int32) // 33
    save_file({"g": uneven}, tmp_path / "groups.safetensors")
    odd = dataclasses.replace(tensor, group_of=open_file(tmp_path / "groups.safetensors")["g"])
    assert kept_weights({"w": odd}) == ()


def test_the_widest_groups_that_fit_are_taken(tmp_path: Path) -> None:
    """A scale of all inputs, or of 256, is that of every 128 of them."""
    for group in (-1, 256):
        found, _ = store_one(tmp_path, gptq(4, group), drawn(48, 512))
        ((_, to),) = kept_weights(found)
        assert to.group == 128
        tensor = found[f"{MODULE}.weight"]
        (parts,) = blocks_of(tensor, to)
        assert torch.equal(dequantize(**parts), tensor.read())


@pytest.mark.parametrize("name", KEPT)
def test_a_part_has_the_numbers_of_its_place(name: str, tmp_path: Path) -> None:
    """Of channels and of inputs, out of several places; a cut may go through a scale's block."""
    found, _ = store_one(tmp_path, PACKINGS[name](), drawn(96, 128))
    ((_, to),) = kept_weights(found)
    tensor = found[f"{MODULE}.weight"]
    assert isinstance(tensor, QuantizedTensor)
    whole = tensor.read()
    for dim, ranges in ((0, ((16, 32), (80, 16))), (1, ((32, 32), (96, 32))), (1, ((64, 64),))):
        part = SomeOf(shape=tensor.shape, dim=dim, ranges=ranges)
        group = math.gcd(to.group, ranges[0][1]) if dim else to.group
        (parts,) = blocks_of(tensor, dataclasses.replace(to, group=group), part)
        assert torch.equal(dequantize(**parts), part.of(whole))


def test_parts_of_experts_in_mxfp4(tmp_path: Path) -> None:
    values = torch.randn(3, 128, 48, generator=torch.Generator().manual_seed(0))
    tensors, _ = mxfp4(values)
    named = {f"experts.up{n}": t.contiguous() for n, t in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    stored = read_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    tensor = dequantized(open_checkpoint(tmp_path), stored, torch.float32)["experts.up"]
    assert isinstance(tensor, QuantizedTensor) and tensor.shape == values.shape
    ((_, to),) = kept_weights({"experts.up": tensor})
    for dim, ranges in ((2, ((16, 32),)), (1, ((0, 32), (96, 32)))):
        part = SomeOf(shape=tensor.shape, dim=dim, ranges=ranges)
        made = [dequantize(**parts) for parts in blocks_of(tensor, to, part)]
        assert torch.equal(torch.stack(made).mT, part.of(tensor.read()))


def test_a_part_that_is_no_whole_blocks_is_an_error(tmp_path: Path) -> None:
    found, _ = store_one(tmp_path, PACKINGS["awq"](), drawn(96, 128))
    tensor = found[f"{MODULE}.weight"]
    assert isinstance(tensor, QuantizedTensor)
    for dim, ranges, says in (
        (0, ((0, 24),), "24 channels of 128 inputs are not whole blocks"),
        (1, ((0, 48),), "96 channels of 48 inputs are not whole blocks"),
        (0, ((4, 16),), "8 values share one stored element"),
    ):
        part = SomeOf(shape=tensor.shape, dim=dim, ranges=ranges)
        with pytest.raises(CheckpointError, match=says):
            list(blocks_of(tensor, INT4, part))


def test_symmetric_gptq_needs_no_zero_points(tmp_path: Path) -> None:
    for bits, format in ((4, "int4"), (8, "int8")):
        packing = gptq(bits, 32, symmetric=True)
        found, numbers = store_one(tmp_path, packing, drawn(48, 96))
        ((_, to),) = kept_weights(found)
        assert (to.format, to.zero) == (format, False)
        (parts,) = blocks_of(found[f"{MODULE}.weight"], to)
        torch.testing.assert_close(dequantize(**parts), numbers, rtol=1e-6, atol=0)


def test_zero_points_that_contradict_the_config_are_named(tmp_path: Path) -> None:
    packing = gptq(4, 32)
    packing.config["sym"] = True
    found, _ = store_one(tmp_path, packing, drawn(48, 96))
    ((_, to),) = kept_weights(found)
    tensor = found[f"{MODULE}.weight"]
    assert isinstance(tensor, QuantizedTensor)
    with pytest.raises(CheckpointError, match="qzeros has zero points other than 8"):
        list(blocks_of(tensor, to))


def test_inputs_that_are_no_whole_blocks_are_widened(tmp_path: Path) -> None:
    for depth, number in ((96, 1), (80, 0)):
        found, _ = store_one(tmp_path, PACKINGS["int-quantized"](), drawn(40, depth))
        assert len(kept_weights(found)) == number


def test_what_config_json_alone_lets_expect() -> None:
    """As inspect does where no weights are at hand: names that are left plain, and the order."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(96, 48)}) for _ in range(3))
            self.gate, self.lm_head = nn.Linear(96, 48), nn.Linear(96, 64)
            self.norm, self.small = nn.LayerNorm(48), nn.Linear(20, 20)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    def expected(config: dict[str, Any]) -> dict[str, Quantization]:
        stored = read_quantization({"quantization_config": config})
        assert stored is not None
        return dict(expected_weights(stored, Model()))

    found = expected(PACKINGS["awq"]().config | {"modules_to_not_convert": ["gate", "layers.1"]})
    assert found == {"layers.0.up.weight": INT4, "layers.2.up.weight": INT4}
    fp8 = expected({"quant_method": "fp8", "modules_to_not_convert": ["layers"]})
    assert fp8 == {"gate.weight": Quantization(format="fp8")}
    assert expected(gptq(4, 32, order=True).config) == {}
    config = PACKINGS["int-quantized"]().config
    config["config_groups"]["group_0"]["targets"] = [r"re:.*layers\.[01]\.up$"]
    assert set(expected(config)) == {"layers.0.up.weight", "layers.1.up.weight"}
