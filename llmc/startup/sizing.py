"""How many blocks fit: measured free memory, less what the profile says the steps take."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import fx

from llmc.config import EngineConfig
from llmc.engine.kv.layout import CacheLayout
from llmc.errors import ConfigError
from llmc.host_memory import host_memory
from llmc.runner.ranks import Kind, Order, Ranks

# Fraction of free memory to use on a machine that also runs other programs.
_CPU_SHARE = 0.4
# Snapshots of recurrent states, for the prefix cache: a few per row, in a small part of the memory.
_SNAPSHOTS_PER_ROW = 8
_SNAPSHOT_SHARE = 8  # at most one eighth of the cache's bytes
# The rows' tables have a place for every token of a context. A config can claim any context: no
# cache limits that of a recurrent model, and a tiny model's cache is smaller than the tables.
_TABLE_TOKENS = 2**30  # of all rows together; words of the tables are numbered in 32 bits
_TABLE_BYTES = 8  # per token: in the tables, and its share of a block in the pool's lists
_TABLE_SHARE = 4  # at most one fourth of the cache's bytes, unless max_model_len is set
_LEAST_CONTEXT = 4096  # whatever is free


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The measured memory that a model needs besides its weights, and its speed."""

    graph: fx.GraphModule  # with the kernels that were measured and will be used for serving
    layout: CacheLayout
    overhead_bytes: int  # activations, CUDA graphs, recurrent states, slots of LoRA adapters
    bytes_per_token: int  # of KV cache, in one group of layers
    prefill_seconds_per_token: float  # 0 if not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The size of the pool, and the context that fits into it."""

    num_blocks: int
    max_model_len: int
    pool_tokens: int  # the longest sequence that fits when it runs alone
    cache_bytes: int
    num_snapshots: int = 0  # of recurrent states


class PeakMemory:
    """Measures this process's peak memory since `start`, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = 0

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return
        # Writing 5 resets the high-water mark (proc(5)). Where that is not allowed, only growth
        # beyond the old peak is measured.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start = psutil.Process().memory_info().rss

    def grown_by(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return int(torch.cuda.max_memory_allocated() - self._start)
        return max(0, peak_resident_bytes() - self._start)


def peak_resident_bytes() -> int:
    """High-water mark of resident memory."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_bytes(device: torch.device, config: EngineConfig) -> int:
    """Bytes available for the cache, before activations are subtracted."""
    if device.type == "cuda":
        gc.collect()  # a profiled step and its cache are a cycle: a function and its globals
        with contextlib.suppress(RuntimeError):  # a capture that failed to end is still under way
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(free - total * (1 - config.gpu_memory_utilization))
    sharers = config.tensor_parallel_size * config.data_parallel_size  # all share this memory
    return int(host_memory().available * _CPU_SHARE / sharers)


def check_weights(device: torch.device, config: EngineConfig, weight_bytes: int) -> None:
    """Refuse weights that a CPU's memory can't hold, before they are read: the process would be
    killed, or its memory moved to disk and back in each step. `weight_bytes`: of a rank."""
    if device.type != "cpu":
        return
    copies = config.tensor_parallel_size * config.data_parallel_size
    if config.distributed_executor_backend == "ray":  # on machines of their own
        copies = 1
    needed, memory = weight_bytes * copies, host_memory()
    if needed > memory.available + psutil.swap_memory().free:
        raise ConfigError(
            f"the weights take {needed / 2**30:.2f} GiB, and of the {memory.total / 2**30:.2f} GiB "
            f"of memory that this machine, or its container, has, {memory.available / 2**30:.2f} "
            "are available; use a smaller model or a quantization, or end what else uses the memory"
        )


def check_budget(device: torch.device, config: EngineConfig) -> None:
    """Refuse a cache that is larger than a CPU's memory: it would be allocated, since the system
    counts memory from its first use, and later the process would be killed."""
    budget = config.kv_cache_memory
    if budget is None or device.type != "cpu":
        return
    total = host_memory().total
    if budget > total:
        raise ConfigError(
            f"kv_cache_memory of {budget / 2**30:.1f} GiB is more than this machine's memory of "
            f"{total / 2**30:.1f} GiB; lower it"
        )


def least_free_bytes(device: torch.device, config: EngineConfig, ranks: Ranks | None) -> int:
    """The minimum of `free_bytes` over all ranks. Every rank must call it."""
    free = free_bytes(device, config)
    if ranks is None:
        return free
    ranks.tell(Order(kind=Kind.LEAST_MEMORY))
    found = ranks.group.all_of(torch.tensor([free], device=device))
    return int(torch.cat(found).min())


def size_pools(
    config: EngineConfig,
    device: torch.device,
    models: Sequence[ModelProfile],
    model_len: int,
    ranks: Ranks | None = None,
    state_bytes: int = 0,
) -> PoolSize:
    """The number of blocks that fits for all models' caches. Each has as many, of its own size.

    `config` and `model_len` are those of the first model, which is the one that is served. All
    ranks get the same number of blocks. ConfigError if the configured memory can't be had.
    """
    check_budget(device, config)
    beside = sum(model.overhead_bytes for model in models)
    return size_pool(
        config,
        models[0].layout,
        bytes_per_token=sum(model.bytes_per_token for model in models),
        model_len=model_len,
        available=least_free_bytes(device, config, ranks) - beside,
        state_bytes=state_bytes,
    )


def size_pool(
    config: EngineConfig,
    layout: CacheLayout,
    *,
    bytes_per_token: int,
    model_len: int,
    available: int,
    state_bytes: int = 0,
) -> PoolSize:
    """Size the pool. `model_len` is the model's own limit. ConfigError if one request does not fit.

    `bytes_per_token` is the size of a token in one of the layout's groups of layers.

    An explicit max_model_len must fit; otherwise the context is reduced to what fits. A model
    without keys and values (fully recurrent) gets blocks for every row, which only tables limit.
    `state_bytes` is the size of a state snapshot, if there are any; snapshots are subtracted first.
    """
    block_bytes = bytes_per_token * config.block_size
    most = _longest_in_tables(config, available)
    if (config.max_model_len or 0) > most:
        raise ConfigError(
            f"the tables of {config.max_num_seqs} requests hold {most} tokens of each, fewer than "
            f"max_model_len {config.max_model_len}; lower max_model_len or max_num_seqs"
        )
    wanted_len = config.max_model_len or min(model_len, most)
    per_request = layout.blocks_for(wanted_len)
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else max(available, 0)
    num_snapshots = 0
    if state_bytes:
        fit = budget // _SNAPSHOT_SHARE // state_bytes
        num_snapshots = min(_SNAPSHOTS_PER_ROW * config.max_num_seqs, fit)
        budget -= num_snapshots * state_bytes
    num_blocks = budget // block_bytes if block_bytes else per_request * config.max_num_seqs
    if config.kv_cache_memory is None:
        num_blocks = min(num_blocks, per_request * config.max_num_seqs)
    need = per_request if config.max_model_len is not None else layout.num_groups
    if num_blocks < need and config.max_model_len is None:
        mend = "raise kv_cache_memory"
        if config.kv_cache_memory is None:  # the model and its steps take all there is
            mend = "use a smaller model or a quantization, or set kv_cache_memory if more is free"
        raise ConfigError(
            f"{budget / 2**20:.3g} MiB of KV cache are less than the "
            f"{need * block_bytes / 2**20:.3g} MiB that {config.block_size} tokens need; {mend}"
        )
    if num_blocks < need:
        raise ConfigError(
            f"{budget / 2**20:.1f} MiB of KV cache hold {layout.longest(num_blocks)} tokens, "
            f"but one request of max_model_len {wanted_len} needs "
            f"{need * block_bytes / 2**20:.1f} MiB; lower max_model_len or raise kv_cache_memory"
        )
    pool_tokens = layout.longest(num_blocks)
    return PoolSize(
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, pool_tokens),
        pool_tokens=pool_tokens,
        cache_bytes=num_blocks * block_bytes,
        num_snapshots=num_snapshots,
    )


def _longest_in_tables(config: EngineConfig, available: int) -> int:
    """The longest context for which there can be tables of all rows: as configured, or what a share
    of the memory holds. Where a token's keys and values are large, the cache is shorter."""
    rows = config.max_num_seqs + 1
    most = _TABLE_TOKENS // rows
    if config.max_model_len is not None:
        return most
    share = max(available, config.kv_cache_memory or 0) // _TABLE_SHARE
    return min(most, max(share // (rows * _TABLE_BYTES), _LEAST_CONTEXT))
