"""Options of an engine as frozen dataclasses, checked when made. No torch, no command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmc.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEVICES = ("auto", "cpu", "cuda")


def _positive(name: str, value: int | None, hint: str = "") -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a positive integer, got {value!r}{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how a model is loaded, compiled and scheduled.

    `model` is None for the built-in one, a local directory, or a hub id. Sizes are in tokens,
    memory in bytes. A None is chosen at start and printed.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_queued: int | None = None  # None: unlimited offline, 4 * max_num_seqs when serving
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    opt_level: Literal[0, 1, 2, 3] | None = None
    passes: Mapping[str, bool] = field(
        default_factory=dict
    )  # {"merge_linears": False} switches off
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}; choose one of {', '.join(DEVICES)}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"unknown load format {self.load_format!r}; choose one of {', '.join(LOAD_FORMATS)}"
            )
        _positive("max_model_len", self.max_model_len)
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _positive("max_num_queued", self.max_num_queued)
        _positive("kv_cache_memory", self.kv_cache_memory, " (bytes)")
        _positive("block_size", self.block_size)
        if self.block_size & (self.block_size - 1) or self.block_size > 1024:
            raise ConfigError(
                f"block_size must be a power of two of at most 1024, got {self.block_size}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.opt_level not in (None, 0, 1, 2, 3):
            raise ConfigError(f"opt_level must be 0, 1, 2 or 3, got {self.opt_level!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
