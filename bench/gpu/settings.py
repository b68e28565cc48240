"""What to measure: models, batches, contexts. `tiny()` is the same run in miniature, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A shape with random weights. `cache_bytes` is enough for the longest measurement."""

    name: str
    config: str  # a file of bench/configs
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    device: str
    dtype: str
    tiny: bool
    models: tuple[Model, ...]
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    max_rows: int = 256
    prompt_len: int = 64
    decode_steps: int = 48
    slope_rows: int = 4
    slope_contexts: tuple[int, ...] = (1024, 8192, 32768)
    prefills: tuple[int, ...] = (512, 2048, 8192)
    max_tokens: int = 8192  # per step
    mixed_requests: int = 256
    mixed_prompt: tuple[int, int] = (32, 512)
    mixed_output: tuple[int, int] = (16, 256)
    peer_requests: int = 32
    peer_prompt: int = 96
    peer_tokens: int = 256
    peer_decode: int = 128
    tuned: tuple[str, ...] = ("8b", "0.6b")  # the models whose kernels' options are measured
    tuned_batches: tuple[int, ...] = (1, 8, 64)  # requests of the decode steps that are timed
    tuned_contexts: tuple[int, ...] = (90, 2048)  # of each of them: options are for all lengths
    tune_seconds: float = 150  # of all searches, after the models started
    ablated: str = "0.6b"
    ablation_batches: tuple[int, ...] = (1, 32)
    levels: tuple[int, ...] = (0, 1, 2)
    default_level: int = 1  # which the parts measure: the default on GPUs
    buffer_bytes: int = 4 * GIB
    square: int = 8192
    gemm_rows: tuple[int, ...] = (1, 8, 64, 256, 2048, 8192)
    time_budget_s: float = 0.3  # per timed call

    def model(self, name: str) -> Model:
        return next(m for m in self.models if m.name == name)

    def of_config(self, config: str) -> Model:
        """The model of a file of bench/configs."""
        given = (model for model in self.models if model.config == config)
        largest = max(model.cache_bytes for model in self.models)
        return next(given, Model(name=config, config=config, cache_bytes=largest))

    @property
    def smallest(self) -> Model:
        return Model(name="tiny", config="tiny.json", cache_bytes=2**24)


def full() -> Settings:
    return Settings(
        device="cuda",
        dtype="bfloat16",
        tiny=False,
        models=(
            Model(name="8b", config="llama-3.1-8b.json", cache_bytes=20 * GIB),
            Model(name="0.6b", config="qwen3-0.6b.json", cache_bytes=18 * GIB),
            Model(name="1b", config="llama-3.2-1b.json", cache_bytes=6 * GIB),
        ),
    )


def tiny() -> Settings:
    """Takes seconds on a CPU. It shows that every part works; its numbers are meaningless."""
    return Settings(
        device="cpu",
        dtype="float32",
        tiny=True,
        models=tuple(
            Model(name=name, config="tiny.json", cache_bytes=2**20) for name in ("8b", "0.6b", "1b")
        ),
        batches=(1, 2, 4),
        max_rows=4,
        prompt_len=8,
        decode_steps=8,
        slope_rows=2,
        slope_contexts=(16, 64, 128),
        prefills=(16, 64),
        max_tokens=64,
        mixed_requests=6,
        mixed_prompt=(4, 16),
        mixed_output=(2, 8),
        peer_requests=3,
        peer_prompt=8,
        peer_tokens=6,
        peer_decode=6,
        tuned_batches=(1,),
        tuned_contexts=(12,),
        tune_seconds=20,
        ablation_batches=(1, 2),
        levels=(0, 1),
        buffer_bytes=2**22,
        square=64,
        gemm_rows=(1, 8),
        time_budget_s=0.01,
    )
