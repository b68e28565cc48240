"""How many blocks fit, and the sentence that a user reads when none do."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save_checkpoint

from llmc.config import EngineConfig
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.errors import ConfigError
from llmc.host_memory import HostMemory
from llmc.passes.page_attention import CacheSpec
from llmc.runner.kv_cache import allocate, bytes_per_token
from llmc.startup import sizing, stages
from llmc.startup.sizing import check_budget, check_weights, free_bytes, size_pool
from llmc.startup.start import start_engine

BF16 = torch.bfloat16
SPEC = CacheSpec(layer=0, kv_heads=2, head_dim=8, v_head_dim=4, dtype=BF16)


def size(
    available: int = 10**9,
    *,
    per_token: int = 100,
    model_len: int = 64,
    windows: tuple[AttentionWindow, ...] = (WHOLE,),
    state_bytes: int = 0,
    **options: Any,
) -> Any:
    config = EngineConfig(block_size=16, max_num_seqs=4, **options)
    layout = CacheLayout(block_size=16, step_tokens=16, windows=windows)
    return size_pool(
        config,
        layout,
        bytes_per_token=per_token,
        model_len=model_len,
        available=available,
        state_bytes=state_bytes,
    )


def test_bytes_of_a_token_over_all_layers() -> None:
    wide = replace(SPEC, layer=1, kv_heads=1, head_dim=32, v_head_dim=32)
    assert bytes_per_token([SPEC, wide]) == 2 * (2 * (8 + 4) + 64)
    assert bytes_per_token([replace(SPEC, dtype=torch.float8_e4m3fn), wide]) == 24 + 2 * 64


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_allocate_shapes(dtype: torch.dtype) -> None:
    specs = [replace(SPEC, dtype=dtype)]
    ((key, value),) = allocate(specs, num_blocks=3, block_size=16, device=torch.device("cpu"))
    assert key.shape == (3, 2, 16, 8) and value.shape == (3, 2, 16, 4)
    assert key.dtype == value.dtype == dtype
    assert key.nbytes + value.nbytes == 3 * 16 * bytes_per_token(specs)


def test_no_more_blocks_than_all_rows_at_full_length_can_use() -> None:
    pool = size()
    assert (pool.num_blocks, pool.max_model_len) == (4 * 4, 64)
    assert pool.cache_bytes == 16 * 16 * 100


def test_as_many_blocks_as_fit() -> None:
    assert size(available=1600 * 7 + 5).num_blocks == 7


def test_windows_make_room_for_longer_contexts() -> None:
    """Of two groups one sees a window of 16 tokens, which with a step of 16 takes 3 blocks."""
    windowed = (WHOLE, AttentionWindow(window=16))
    pool = size(available=1600 * 13, model_len=1000, windows=windowed)
    assert (pool.max_model_len, pool.pool_tokens) == (160, 160)
    whole = size(available=1600 * 13, model_len=1000, windows=(WHOLE, WHOLE))
    assert whole.max_model_len == 6 * 16
    with pytest.raises(ConfigError, match="hold 160 tokens, but one request of max_model_len 176"):
        size(available=1600 * 13, max_model_len=176, windows=windowed)


def test_explicit_memory_is_taken_as_it_is() -> None:
    assert size(available=0, kv_cache_memory=1600 * 100).num_blocks == 100


def test_snapshots_of_states_take_an_eighth_at_most_and_are_eight_a_row() -> None:
    memory = 1600 * 100
    few = size(available=memory, state_bytes=7000)
    assert (few.num_snapshots, few.num_blocks) == (2, 4 * 4)
    tight = size(kv_cache_memory=memory, state_bytes=7000)
    assert (tight.num_snapshots, tight.num_blocks) == (2, (memory - 14000) // 1600)
    assert size(available=10**9, state_bytes=7000).num_snapshots == 8 * 4
    none = size(kv_cache_memory=memory, state_bytes=20001)
    assert (none.num_snapshots, none.num_blocks) == (0, 100)
    alone = size(available=memory, per_token=0, state_bytes=7000)  # no keys and values
    assert (alone.num_snapshots, alone.num_blocks) == (2, 4 * 4)


@pytest.mark.parametrize("per_token", [0, 1])
def test_an_open_context_is_cut_to_what_tables_of_all_rows_can_hold(per_token: int) -> None:
    """A config may state any, and no cache limits that of a recurrent or tiny model."""
    pool = size(available=4 * 8 * 5 * 10_000, per_token=per_token, model_len=10**9)
    assert (pool.max_model_len, pool.num_blocks) == (10_000, 4 * 625)
    assert size(available=70_000, per_token=per_token, model_len=10**9).max_model_len == 4096
    most = 2**30 // 5
    assert size(10**15, per_token=per_token, model_len=10**9).max_model_len == most
    assert size(10**15, per_token=per_token, max_model_len=most).max_model_len == most
    with pytest.raises(ConfigError, match=f"4 requests hold {most} tokens of each, fewer than max"):
        size(10**15, per_token=per_token, max_model_len=most + 1)


def test_memory_that_is_set_for_the_cache_counts_for_tables_too() -> None:
    pool = size(available=-5, kv_cache_memory=10**7, per_token=100, model_len=10_000)
    assert pool.max_model_len == 10_000


def test_an_open_context_is_cut_to_what_fits() -> None:
    pool = size(available=1600 * 2)
    assert (pool.num_blocks, pool.max_model_len) == (2, 32)


def test_an_explicit_context_must_fit_and_the_message_has_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        size(available=1600 * 3, max_model_len=64, per_token=10**5, kv_cache_memory=48 * 10**5)
    message = str(caught.value)
    assert message == (
        "4.6 MiB of KV cache hold 48 tokens, but one request of max_model_len 64 needs 6.1 MiB; "
        "lower max_model_len or raise kv_cache_memory"
    )
    assert size(max_model_len=64, per_token=10**5, kv_cache_memory=64 * 10**5).num_blocks == 4


@pytest.mark.parametrize("available", [0, -5, 1599])
def test_room_for_no_block_at_all(available: int) -> None:
    with pytest.raises(ConfigError, match=r"less than the 0.00153 MiB that 16 tok.*quantization"):
        size(available=available)
    with pytest.raises(ConfigError, match=r"less than the 0.00153 MiB.*; raise kv_cache_memory"):
        size(kv_cache_memory=1599)


def test_free_memory_on_the_cpu_leaves_most_to_others() -> None:
    import psutil

    free = free_bytes(torch.device("cpu"), EngineConfig())
    assert 0 < free < 0.6 * psutil.virtual_memory().available


def test_the_cpus_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = HostMemory(total=3 * 2**30, available=2**30)
    monkeypatch.setattr(sizing, "host_memory", lambda: limited)
    cpu, config = torch.device("cpu"), EngineConfig()
    assert free_bytes(cpu, config) < 2**30
    with pytest.raises(ConfigError, match=r"kv_cache_memory of 4\.0 GiB is more than .* 3\.0 GiB"):
        check_budget(cpu, replace(config, kv_cache_memory=2**32))


def test_weights_larger_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = HostMemory(total=3 * 2**30, available=2**30)
    monkeypatch.setattr(sizing, "host_memory", lambda: limited)
    swap = SimpleNamespace(free=2**29)
    monkeypatch.setattr(sizing.psutil, "swap_memory", lambda: swap)
    cpu, config = torch.device("cpu"), EngineConfig()
    check_weights(cpu, config, 3 * 2**29)
    with pytest.raises(
        ConfigError, match=r"take 1\.75 GiB, and of the 3\.00 GiB .* has, 1\.00 are"
    ):
        check_weights(cpu, config, 7 * 2**28)
    ranks = replace(config, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"weights take 2\.00 GiB"):
        check_weights(cpu, ranks, 2**30)
    check_weights(cpu, replace(ranks, distributed_executor_backend="ray"), 2**30)
    check_weights(torch.device("cuda"), config, 2**40)  # the allocator refuses it


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_size_of_weights_is_known_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    known: list[int] = []
    monkeypatch.setattr(stages, "check_weights", lambda device, config, size: known.append(size))
    path = save_checkpoint("qwen3", tmp_path)
    started = start_engine(EngineConfig(model=str(path), quantization=quantization, opt_level=0))
    assert known == [started.info.weight_bytes]


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    cpu, config = torch.device("cpu"), EngineConfig(kv_cache_memory=2**50)
    with pytest.raises(ConfigError, match=r"kv_cache_memory of 1048576\.0 GiB is more than"):
        check_budget(cpu, config)
    check_budget(cpu, replace(config, kv_cache_memory=2**20))
    check_budget(torch.device("cuda"), config)  # allocated at once: the driver refuses it


def test_free_memory_of_a_gpu_is_measured_without_what_profiling_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Step: ...

    step = Step()
    step.itself = step  # type: ignore[attr-defined]
    left, calls = weakref.ref(step), []
    del step
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(left()))

    def mem_get_info() -> tuple[int, int]:
        assert calls == [None]
        return 700, 1000

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    config = EngineConfig(gpu_memory_utilization=0.75)
    assert free_bytes(torch.device("cuda"), config) == 450


def test_peak_memory_sees_what_was_freed_again() -> None:
    # In a process of its own: what other tests left may be freed meanwhile, and counts against it.
    code = """
import torch
from llmc.startup.sizing import PeakMemory

peak = PeakMemory(torch.device("cpu"))
peak.start()
block = torch.ones(256 * 2**20)  # 1 GiB
del block
print(peak.grown_by())
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert 1000 * 2**20 < int(done.stdout) < 1100 * 2**20


def test_an_allocation_that_fails_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*args: object) -> None:
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr("llmc.startup.stages.load_model", allocate)
    config = EngineConfig(model=str(save_checkpoint("llama", tmp_path)), device="cpu")
    with pytest.raises(ConfigError, match=r"can't allocate memory.*; use a smaller .*ulimit -v"):
        start_engine(config)


def test_a_gpu_that_is_too_small_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of "
            "15.6 GiB of which 98.00 MiB is free. Process 7 has 9.00 GiB memory in use. "
            + 40
            * "x "
        )

    monkeypatch.setattr("llmc.startup.stages.load_model", load)
    config = EngineConfig(model=str(save_checkpoint("llama", tmp_path)), device="cpu")
    with pytest.raises(ConfigError, match=r"15.6 GiB of which 98.00 MiB is free.*; use a smaller"):
        start_engine(config)
