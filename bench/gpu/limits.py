"""Measures this machine's limits: bytes per second copied and read, bf16 products per second."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.clock import time_call
from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.shapes import Linear, linears, read_config
from llmc.load_test.machine import describe_machine, package_versions

_COLD_BYTES = 2**29  # weights are timed over copies that no cache can hold together


def run(settings: Settings, record: Record) -> None:
    record.measure("machine", machine)
    record.measure("bandwidth", partial(bandwidth, settings))
    record.measure("peak", partial(peak, settings))
    for model in settings.models:
        shapes = linears(read_config(model.config))
        record.measure(f"linears {model.name}", partial(products, settings, shapes))


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"versions": package_versions(), **describe_machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["capability"] = torch.cuda.get_device_capability(0)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
    schema = getattr(torch.ops.aten._flash_attention_forward, "default", None)
    facts["flash_attention_schema"] = str(getattr(schema, "_schema", "missing"))
    return facts


def bandwidth(settings: Settings) -> dict[str, float]:
    """Bytes per second. Reading is the best of a sum and of a matrix times a vector."""
    device, budget = torch.device(settings.device), settings.time_budget_s
    count = settings.buffer_bytes // 4
    big = torch.ones(count, device=device)
    rows = 2 ** (count.bit_length() // 2)
    matrix = torch.randn(rows, count // rows, device=device, dtype=torch.bfloat16)
    vector = torch.randn(matrix.shape[1], device=device, dtype=torch.bfloat16)
    half = count // 2
    copy = time_call(lambda: big[:half].copy_(big[half : 2 * half]), device, budget_s=budget)
    total = time_call(big.sum, device, budget_s=budget)
    product = time_call(partial(torch.mv, matrix, vector), device, budget_s=budget)
    by_sum = big.nbytes / total.seconds
    by_product = matrix.nbytes / product.seconds
    return {
        "copy_bytes_per_s": 2 * half * 4 / copy.seconds,
        "read_bytes_per_s": max(by_sum, by_product),
        "sum_bytes_per_s": by_sum,
        "matrix_vector_bytes_per_s": by_product,
    }


def peak(settings: Settings) -> dict[str, float]:
    """cuBLAS bf16 at 8192 cubed, on random data."""
    device, size = torch.device(settings.device), settings.square
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = time_call(partial(torch.mm, left, right), device, budget_s=settings.time_budget_s)
    return {"flop_per_s": 2 * size**3 / took.seconds, "spread": took.spread}


def products(settings: Settings, shapes: list[Linear]) -> list[dict[str, Any]]:
    """The library's linear at the model's shapes, each over weights that no cache can hold."""
    device, found = torch.device(settings.device), []
    cold = min(_COLD_BYTES, settings.buffer_bytes)
    for shape in shapes:
        size = shape.inputs * shape.outputs * 2
        copies = min(16, -(-cold // size))
        weights = torch.randn(
            copies, shape.outputs, shape.inputs, device=device, dtype=torch.bfloat16
        )
        for rows in settings.gemm_rows:
            if shape.name == "head" and rows > 256:
                continue  # never more rows than requests
            x = torch.randn(rows, shape.inputs, device=device, dtype=torch.bfloat16)

            def call(x: torch.Tensor = x, weights: torch.Tensor = weights) -> None:
                for weight in weights:
                    F.linear(x, weight)

            took = time_call(call, device, budget_s=settings.time_budget_s / 3).seconds / copies
            found.append(
                {
                    "linear": shape.name,
                    "shape": [rows, shape.inputs, shape.outputs],
                    "us": took * 1e6,
                    "bytes_per_s": size / took,
                    "flop_per_s": 2 * rows * shape.inputs * shape.outputs / took,
                }
            )
    return found
