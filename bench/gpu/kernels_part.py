"""`kernels`: the work of bench.kernels on this device, and attention over a skewed batch compared
with a split that ignores lengths.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from bench.clock import time_call
from bench.gpu import limits
from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import release
from bench.kernel_work import (
    Maker,
    attention_case,
    decode_work,
    fast,
    made,
    prefill_work,
    prepare_work,
    row_work,
    sample_work,
)
from bench.kernels import (
    HEAD,
    SKEWED,
    SKEWED_LABEL,
    format_row,
    gpu_work,
    measure,
)
from bench.linear_work import (
    embedding_work,
    expert_work,
    fused_work,
    low_bit_expert_work,
    low_bit_work,
)
from llmc.kernels.cpu.build import load

if TYPE_CHECKING:
    from llmc.kernels.triton.configs import AttentionConfig

_HEADS, _KV, _DIM = 32, 8, 128
_COMPILE_S = 12.0


def run(settings: Settings, record: Record) -> None:
    device = torch.device(settings.device)
    if device.type == "cuda":
        importlib.import_module("llmc.kernels.triton")
    else:
        importlib.import_module("llmc.kernels.cpu")
        load()
    read = record.measure("bandwidth", partial(limits.bandwidth, settings))
    peak = record.measure("peak", partial(limits.peak, settings))
    release()
    nan = float("nan")
    most = {
        "read": read["read_bytes_per_s"] if read else nan,
        "bf16": peak["flop_per_s"] if peak else nan,
        "fp32": nan,
    }
    works = list(tiny_work(device) if settings.tiny else gpu_work(device))
    if device.type == "cuda":
        record.measure("compile", partial(compile_all, works))
    print(HEAD)
    for number, maker in enumerate(works):
        record.measure(f"{number:02}", partial(_measured, maker, most))
        release()
    if device.type == "cuda":
        record.measure("static split", partial(static_split, device))
    tiny = ((32,), (4, 2, 16)) if settings.tiny else ()
    record.measure("key tiles", partial(key_tiles, device, *tiny))


def compile_all(works: Sequence[Maker]) -> dict[str, int]:
    """Compile their kernels several at a time, as far as the time allows; what fails is reported
    where it is measured."""
    from llmc.kernels.triton.launch import compiling_together

    num_failed = 0
    until = time.monotonic() + _COMPILE_S
    with compiling_together():
        for maker in works:
            if time.monotonic() > until:
                break
            try:
                for work in made(maker):
                    work.run()
            except Exception:
                num_failed += 1
            release()
    return {"makers": len(works), "failed": num_failed}


def _measured(maker: Maker, most: dict[str, float]) -> list[dict[str, Any]]:
    found = []
    for work in made(maker):
        result = measure(work, most)
        print(format_row(result), flush=True)
        ratio = result.torch_ms / result.ms if result.torch_ms is not None else None
        found.append({**asdict(result), "torch_ratio": ratio})
    return found


def tiny_work(device: torch.device) -> Iterator[Maker]:
    yield partial(decode_work, "bf16", [64] * 2, 4, 2, 16, device)
    yield partial(decode_work, "bf16", [128, 16], 4, 2, 16, device, SKEWED_LABEL)
    yield partial(prefill_work, "bf16", 32, 4, 2, 16, device)
    yield partial(sample_work, 2, 300, "top_k+top_p", device)
    yield partial(prepare_work, 4, 64, device)
    yield partial(fused_work, 2, 64, 32, device)
    yield partial(low_bit_work, "int4", 2, 64, 32, device)
    yield partial(low_bit_work, "fp8", 70, 64, 32, device)
    yield partial(embedding_work, "int4", 2, 64, 32, device)
    yield partial(expert_work, 2, 4, 2, 32, 16, device)
    yield partial(low_bit_expert_work, "fp8", 2, 4, 2, 32, 16, device)
    yield partial(row_work, "bf16", 2, 64, device)


def key_tiles(
    device: torch.device,
    lengths: tuple[int, ...] = (2048, 8192),
    sizes: tuple[int, int, int] = (_HEADS, _KV, _DIM),
) -> dict[str, float]:
    """Prompts in blocks of 64 tokens: tiles of keys loaded by pointers, through descriptors, and by
    a warp of its own. Without a GPU, each is torch's or the C++ kernel."""
    from llmc.kernels.triton import paged_attention
    from llmc.kernels.triton.attention_tiles import specializes

    choose = paged_attention.attention_config
    ways: dict[str, dict[str, bool]] = {
        "pointers": {"descriptors": False, "warp_specialize": False},
        "descriptors": {"descriptors": True, "warp_specialize": False},
    }
    if specializes(device):
        ways["warps"] = {"descriptors": True, "warp_specialize": True}
    found = {}
    for tokens in lengths:
        case = attention_case([(tokens, tokens)], *sizes, torch.bfloat16, device, 64)
        for name, options in ways.items():

            def config(*args: int, options: dict[str, bool] = options) -> AttentionConfig:
                return replace(choose(*args), **options)

            with mock.patch.object(paged_attention, "attention_config", config):
                seconds = time_call(fast("paged_attention", case), device).seconds
            found[f"{name}_{tokens}_ms"] = seconds * 1e3
    return found


def static_split(device: torch.device) -> dict[str, float]:
    """The skewed batch, with the long request split into as many ranges as a split would use that
    depends only on the number of requests: `ranges` = concurrent programs / (requests * kv heads).

    Our kernel distributes `target` ranges by length, so a target of ranges * all / longest keys
    gives the longest request exactly that many.
    """
    from llmc.kernels.triton import paged_attention
    from llmc.kernels.triton.configs import attention_config
    from llmc.kernels.triton.launch import multiprocessors

    config = attention_config(_HEADS // _KV, _DIM, 2, 2, False)
    programs = config.waves * multiprocessors(device)
    ranges = -(-programs // (len(SKEWED) * _KV))
    target = -(-ranges * sum(SKEWED) // max(SKEWED))
    fewer = max(1, target * _KV // config.waves)
    work = decode_work("bf16", SKEWED, _HEADS, _KV, _DIM, device, SKEWED_LABEL)
    balanced = time_call(work.run, device).seconds
    with mock.patch.object(paged_attention, "multiprocessors", lambda device: fewer):
        static = time_call(work.run, device).seconds
    return {
        "ranges_of_the_longest": ranges,
        "balanced_ms": balanced * 1e3,
        "static_ms": static * 1e3,
        "speedup": static / balanced,
    }
