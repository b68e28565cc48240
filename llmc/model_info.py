"""Facts about a started model for the rest of llmc: plain data, also sent between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.pooling import PoolingInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegins:
    """A part of start-up that begins now."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One finished part of start-up."""

    name: str
    seconds: float
    detail: str


OnPhase = Callable[[PhaseBegins | Phase], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """How a model reads images: `row_token` is the placeholder token id for one image row.

    `most_rows`: the most rows of an image, if its tokens attend to all of it and so are computed in
    one step; 0: attention within an image is causal, and any number of rows is allowed.
    """

    row_token: int
    max_per_prompt: int
    most_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that runs and the size of its KV cache. Memory in bytes, lengths in tokens."""

    name: str
    path: Path
    tokenizer_path: Path | None
    max_model_len: int
    vocab_size: int  # the width of the logits
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    pool_tokens: int  # the longest sequence that fits when it runs alone
    blocks_per_request: int  # at most, for a request of max_model_len tokens
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int  # of recurrent layers; 0 for a model with attention only
    num_snapshots: int = 0  # of such states, for the prefix cache; 0: not cached
    is_default: bool
    opt_level: int
    pass_reports: tuple[str, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams
    certificate_key: str = ""  # of its architecture's certificate; "": it can't be saved
    disabled_passes: tuple[str, ...] = ()  # because that certificate names them
    pooling: PoolingInfo | None = None  # None: it generates text
    images: ImageInfo | None = None
    image_refusal: str = "it reads text only"  # the reason, if it accepts no images
    extra_args: tuple[str, ...] = ()  # names that its logits processors accept in requests

    @property
    def can_cache_prefixes(self) -> bool:
        """Whether prefixes can be cached: not without a KV cache, and states only as snapshots."""
        has_cache = self.kv_bytes_per_token and not self.state_bytes_per_request
        return bool(self.num_snapshots or has_cache)
