"""The engine as the frontend sees it, and how both entry points (`LLM`, `AsyncLLM`) get one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from llmc.config import ActivationBits, EngineConfig, SchedulingPolicy
from llmc.engine.messages import (
    AddRequest,
    EngineState,
    EngineStats,
    Operate,
    OperationResult,
    RequestUpdate,
)
from llmc.errors import ConfigError
from llmc.frontend.ported_options import port_keywords
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.model_files import tokenizer_folder
from llmc.text.template_file import check_template_kwargs, read_template
from llmc.text.tokenizer import Tokenizer, preload
from llmc.text.tools.given_format import read_tool_format

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo, OnPhase
    from llmc.startup.start import Started


class EngineOptions(TypedDict, total=False):
    """EngineConfig without `model`, as keyword arguments for editors and type checkers."""

    tokenizer: str | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    override_generation_config: Mapping[str, Any] | None
    hf_overrides: Mapping[str, Any] | None
    tool_format: str
    revision: str | None
    trust_remote_code: bool
    task: str
    pooling: str
    normalize: bool | None
    dtype: str
    device: str
    load_format: str
    quantization: Literal["int8", "int4", "fp8", "none"] | None
    activation_bits: ActivationBits
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int | None
    block_size: int
    kv_cache_dtype: str
    kv_cache_memory: int | None
    swap_space: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    distributed_executor_backend: str
    data_parallel_size: int
    enable_prefix_caching: bool
    async_scheduling: bool | None
    scheduling_policy: SchedulingPolicy
    speculative_config: Mapping[str, object] | SpeculativeConfig | None
    limit_mm_per_prompt: Mapping[str, int] | None
    opt_level: Literal[0, 1, 2, 3] | None
    cuda_graph_buckets: Sequence[int] | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_lora_expert_rank: int
    max_cpu_loras: int | None
    passes: Mapping[str, bool]
    extra_passes: Sequence[object]
    logits_processors: Sequence[object]
    seed: int


class Engine(Protocol):
    """The part of `engine.core.EngineCore` that the frontend uses. Called from one thread only."""

    def add(self, message: AddRequest, /) -> None: ...
    def abort(self, request_id: str, /) -> object: ...
    def step(self) -> Sequence[RequestUpdate]: ...
    def use_idle_time(self) -> bool: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def state(self) -> EngineState: ...
    def release_caches(self) -> int: ...
    def run_operation(self, order: Operate, /) -> OperationResult: ...


def make_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments, including vLLM's. The error for an unknown one names the
    closest match."""
    known = [f.name for f in dataclasses.fields(EngineConfig) if f.name != "model"]
    options = port_keywords(options, frozenset(known))
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
            raise ConfigError(f"unknown engine option {name!r}; {hint}")
    return refuse_several(EngineConfig(model=model, **options))


def refuse_several(config: EngineConfig) -> EngineConfig:
    """Raise ConfigError for a config with several engines, where only one is supported."""
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size {config.data_parallel_size} is for llmc serve, which runs the "
            "engines in separate processes; here there is only one engine"
        )
    return config


def start(config: EngineConfig, on_phase: OnPhase | None = None) -> Started:
    """Load the model and build its engine. The import is lazy, because it imports torch.

    The engine's own queue is unlimited: AsyncLLM refuses requests before that, and offline use has
    no limit.
    """
    from llmc.startup.start import start_engine

    return start_engine(dataclasses.replace(config, max_num_queued=None), on_phase)


def preload_tokenizer(config: EngineConfig) -> None:
    """Import what `load_tokenizer` will need, while the engine loads in another process."""
    preload(None if config.trust_remote_code else tokenizer_folder(config))


def load_tokenizer(config: EngineConfig, info: ModelInfo) -> Tokenizer | None:
    """The model's tokenizer; None if it has none, and prompts must be token ids."""
    if info.tokenizer_path is None:
        return None
    tokenizer = Tokenizer.load(info.tokenizer_path, trust_remote_code=config.trust_remote_code)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    tokenizer.template_defaults = check_template_kwargs(config.chat_template_kwargs)
    tokenizer.given_tool_format = read_tool_format(config.tool_format)
    return tokenizer
