"""Preempted requests that wait in host memory go on with the text they would have had."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny_engine
import tiny_models
from tiny_configs import save_random, tiny_config

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.kv.swap import SwapConfig
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.errors import ConfigError
from llmc.model_info import Phase, PhaseBegins
from llmc.startup.start import start_engine

PROMPTS = tiny_models.prompts((9, 5, 12, 7))
NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("swap"))


def engine(running: tiny_engine.Running, swap: SwapConfig | None) -> EngineCore:
    info, windows = running.started.info, running.started.engine.scheduler.layout.windows
    for cache in running.caches:
        cache.fill_(float("nan"))
    return EngineCore(
        running.started.runner,
        EngineLimits(
            num_blocks=NUM_BLOCKS * len(windows),
            block_size=info.block_size,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        ),
        EngineFeatures(enable_prefix_caching=False, swap_config=swap, windows=windows),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_swapped_requests_go_on_as_recomputed_ones(family: str, tmp_path: Path) -> None:
    """The second has layers with and without attention windows."""
    path = tiny_models.save_checkpoint(family, tmp_path)
    running = tiny_engine.start(path, swap_space=2**20)
    swapper = running.started.runner.swap_space
    assert swapper is not None and swapper.num_slots >= NUM_BLOCKS
    swap = running.started.engine.scheduler.rows.swap
    assert swap is not None
    measured = swap.config
    assert measured.cost.prefill_seconds_per_token > 0
    cheap = dataclasses.replace(measured.cost, prefill_seconds_per_token=1e9)
    swapping = engine(running, SwapConfig(swapper.num_slots, cheap))
    got = tiny_engine.generate(swapping, PROMPTS, 14)
    assert swapping.stats().num_swaps > 0
    recomputing = engine(running, None)
    want = tiny_engine.generate(recomputing, PROMPTS, 14)
    assert recomputing.stats().num_preemptions > 0
    assert [g.tokens for g in got] == [w.tokens for w in want]


def test_a_space_for_less_than_a_block_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="swap_space of 100 bytes is too small for one block"):
        tiny_engine.start(path, swap_space=100)


@pytest.mark.parametrize(
    ("family", "why"), [("mamba2", "recurrent states are not in blocks"), ("mistral", None)]
)
def test_host_memory_is_reserved_only_for_models_that_swap(
    family: str, why: str | None, tmp_path: Path
) -> None:
    model = save_random(tiny_config(family), tmp_path / family)
    details: list[str] = []

    def on_phase(phase: Phase | PhaseBegins) -> None:
        if isinstance(phase, Phase):
            details.append(phase.detail)

    config = EngineConfig(model=str(model), dtype="float32", opt_level=0, swap_space=2**20)
    started = start_engine(config, on_phase=on_phase)
    assert (started.runner.swap_space is None) == (why is not None)
    assert any(f"no swap, since {why}" in detail for detail in details) == (why is not None)
