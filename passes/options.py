"""What the passes need to know about the engine.

This is apart from pipeline.py, since a start with a cached program needs the options for the
program's key, but no passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmc.kernels.quantized_linear import Format, Quantization
from llmc.pooling import DraftHead, Method

# Layers in which image tokens attend to their whole image; "windowed": those with a window.
Where = Literal["none", "all", "windowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What the passes need to know about the engine that will run the graph."""

    block_size: int
    max_positions: int
    device_type: str  # "cpu" or "cuda"
    long_context_from: int = (
        0  # first position of long sequences, if they have their own frequencies
    )
    kv_cache_dtype: str = "auto"  # a key of cache_dtype.CACHE_DTYPES; "auto": the model's own dtype
    quantization: Format | None = None
    kept: tuple[tuple[str, Quantization], ...] = ()  # weights that keep their stored format
    activation_bits: int | None = None  # of inputs of integer weights; None: not rounded
    float8_activations: bool = False  # inputs of fp8 weights are rounded to fp8
    max_loras: int = 0  # LoRA adapters that can be active at a time
    max_lora_rank: int = 0
    max_lora_expert_rank: int = 0  # for adapters on routed experts; 0: not supported
    pooling: Method | None = None  # None: tokens are sampled
    encoder: bool = False  # attention is bidirectional
    whole_images: Where = "none"  # layers in which an image token attends to its whole image
    tensor_parallel_size: int = 1  # ranks that each compute a part of every layer
    taps: tuple[int, ...] | None = None  # layers that a draft head reads (tap_states); None: none
    draft_head: DraftHead | None = None  # set if the model being compiled is a draft head
