"""--kv-cache-dtype: a model with a narrower cache says nearly the same and holds more tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_engine
import tiny_models
import torch
from tiny_configs import save_random, tiny_config

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.kernels.cache_dtype import CACHE_DTYPES

# Largest shift of a log-probability that rounding keys and values to 10, 7, 3 or 2 bits or 1/127
# of the largest may cause in these random models, whose attention is sharper than a trained one's.
TOLERANCE = {
    "float16": 0.001,
    "bfloat16": 0.008,
    "fp8_e4m3": 0.12,
    "fp8_e5m2": 0.2,
    "int8": 0.04,
}


@pytest.mark.parametrize(
    "family,names,lengths,chunk",
    [
        ("qwen3", list(TOLERANCE), (11, 3, 26), 16),
        ("gpt_oss", ["float16", "fp8_e4m3", "int8"], (11, 3, 26), 16),
        ("minicpm3", ["float16", "fp8_e4m3"], (11, 3, 26), 16),
        ("minicpm3", ["float16", "fp8_e4m3"], (45, 3, 90), 48),  # many tokens: latents are expanded
    ],
)
def test_log_probabilities_stay_close(
    family: str, names: list[str], lengths: tuple[int, ...], chunk: int, tmp_path: Path
) -> None:
    if family in tiny_models.FAMILIES:
        path = tiny_models.save_checkpoint(family, tmp_path)
    else:  # its cache holds a latent, whose values are a part of its keys
        path = save_random(tiny_config(family), tmp_path)
    first = {}
    for name in ("auto", *names):
        running = tiny_engine.start(path, kv_cache_dtype=name, max_model_len=128)
        assert {c.dtype for c in running.caches} == {CACHE_DTYPES[name] or torch.float32}
        engine = running.engine(max_num_batched_tokens=chunk)  # prompts read back what was cached
        made = tiny_engine.generate(engine, tiny_models.prompts(lengths), 1)
        first[name] = torch.tensor([g.logprobs[0] for g in made])
    for name in names:
        shift = (first["auto"] - first[name]).abs().max()
        assert 0 < shift < TOLERANCE[name]


def test_the_same_memory_holds_twice_the_tokens(tmp_path: Path) -> None:
    path = tiny_models.save_checkpoint("qwen3", tmp_path)
    options = {"dtype": "bfloat16", "kv_cache_memory": 2**20}
    wide = tiny_engine.start(path, **options).started.info
    narrow = tiny_engine.start(path, **options, kv_cache_dtype="fp8_e4m3").started.info
    assert narrow.num_blocks == 2 * wide.num_blocks
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token


def test_an_int8_cache_is_smaller_by_what_its_scales_leave(tmp_path: Path) -> None:
    path = tiny_models.save_checkpoint("qwen3", tmp_path)
    wide = tiny_engine.start(path, dtype="bfloat16", max_model_len=64)
    narrow = tiny_engine.start(path, dtype="bfloat16", max_model_len=64, kv_cache_dtype="int8")
    assert {c.dtype for c in narrow.caches} == {torch.int8}
    [dim] = {c.shape[3] for c in narrow.caches}
    infos = wide.started.info, narrow.started.info
    assert infos[1].kv_bytes_per_token * 2 * dim == infos[0].kv_bytes_per_token * (dim + 4)
    blocks = len(narrow.caches[0])
    size = sum(c.nbytes for c in narrow.caches) // blocks
    assert size == infos[1].kv_bytes_per_token * infos[1].block_size


def test_latents_are_not_stored_in_int8(tmp_path: Path) -> None:
    path = save_random(tiny_config("minicpm3"), tmp_path)
    running = tiny_engine.start(path, kv_cache_dtype="int8", max_model_len=64)
    assert {c.dtype for c in running.caches} == {torch.float32}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'fp4'; choose one of auto, flo"):
        EngineConfig(kv_cache_dtype="fp4")


def test_a_cache_of_another_16_bit_dtype_is_refused(tmp_path: Path) -> None:
    path = tiny_models.save_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="float16 is for models in float16 or float32, not bflo"):
        tiny_engine.start(path, dtype="bfloat16", kv_cache_dtype="float16")
    same = tiny_engine.start(path, dtype="bfloat16", kv_cache_dtype="bfloat16", max_model_len=64)
    assert {c.dtype for c in same.caches} == {torch.bfloat16}
