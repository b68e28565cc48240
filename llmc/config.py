"""Engine options as a frozen dataclass, validated on construction. No torch, no command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from llmc.errors import ConfigError
from llmc.pooling import POOLINGS, TASKS
from llmc.speculative_config import SpeculativeConfig

MAX_LORAS, MAX_LORA_RANK = 1024, 512
MAX_RANKS = 64
MAX_IMAGES, DEFAULT_IMAGES = 256, 16  # per prompt
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip
MAX_SEQS = 16383  # rows that the kernels' planning vectors hold
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8", "none")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
EXECUTOR_BACKENDS = ("mp", "ray")
DEVICES = ("auto", "cpu", "cuda")
# the optimization levels from which steps are CUDA graphs on GPUs, and Inductor's code
GRAPHS_LEVEL, INDUCTOR_LEVEL = 1, 2
ActivationBits = Literal[8, 16, 32]
SchedulingPolicy = Literal["fcfs", "priority"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority")


def _positive(name: str, value: int | None, hint: str = "") -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a positive integer, got {value!r}{hint}")


def _one_of(name: str, value: str | None, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options that control how a model is loaded, compiled and scheduled.

    `model` is a directory, a GGUF file or a hub id; None selects the default model. Sizes are in
    tokens, memory in bytes. Options that are None are chosen at startup and printed.
    """

    model: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None  # a Jinja file or the template itself; None: the model's own
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of all chats
    override_generation_config: Mapping[str, Any] | None = None  # of the model's sampling defaults
    hf_overrides: Mapping[str, Any] | None = None  # fields of config.json with other values
    tool_format: str = "auto"  # inferred from the chat template; or generic, JSON or a JSON file
    revision: str | None = None
    trust_remote_code: bool = False
    task: str = "auto"  # what the model is served for; auto: follow the model's files
    pooling: str = "auto"  # auto: follow the files, else last token (decoder) or mean (encoder)
    normalize: bool | None = None  # scale embeddings to length 1; None: follow the model's files
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    quantization: Literal["int8", "int4", "fp8", "none"] | None = None  # None: as stored
    activation_bits: ActivationBits = 16  # of inputs of integer weights; 8: of fp8 ones too
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_queued: int | None = None  # None: unlimited offline, 4 * max_num_seqs when serving
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # the activations'; for GGUF files on CPU float16
    kv_cache_memory: int | None = None
    swap_space: int = 0  # host memory for the blocks of preempted requests
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1  # ranks (processes), each computing a part of every layer
    distributed_executor_backend: str = "mp"  # where ranks run: local processes, or Ray actors
    data_parallel_size: int = 1  # engines of a server, which share this machine evenly
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None  # plan a step while the previous one runs
    scheduling_policy: SchedulingPolicy = "fcfs"
    speculative_config: SpeculativeConfig | None = None  # or a mapping of its fields
    opt_level: Literal[0, 1, 2, 3] | None = None
    cuda_graph_buckets: Sequence[int] | None = None  # decode batch sizes captured from -O1 on
    limit_mm_per_prompt: Mapping[str, int] | None = None  # {"image": 4}; 0: no images
    enable_lora: bool = False
    max_loras: int = 1  # adapters that a step can use at once, in slots of device memory
    max_lora_rank: int = 16
    max_lora_expert_rank: int = 0  # of adapters on routed experts; 0: reject them
    max_cpu_loras: int | None = None  # adapters kept in host memory; None: max_loras
    passes: Mapping[str, bool] = field(
        default_factory=dict
    )  # {"merge_linears": False} disables a pass
    extra_passes: Sequence[object] = ()  # passes, or `module:pass` and `file.py:pass`
    logits_processors: Sequence[object] = ()  # classes, or `module:class` and `file.py:class`
    seed: int = 0

    @property
    def max_images(self) -> int:
        """Most images per prompt; 0: none are accepted, and the vision tower is not loaded."""
        return (self.limit_mm_per_prompt or {}).get("image", DEFAULT_IMAGES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of(
            "distributed executor backend", self.distributed_executor_backend, EXECUTOR_BACKENDS
        )
        _one_of("task", self.task, TASKS)
        _one_of("pooling", self.pooling, POOLINGS)
        _one_of("load format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        if self.activation_bits not in get_args(ActivationBits):
            raise ConfigError(f"activation_bits must be 8, 16 or 32, got {self.activation_bits!r}")
        _positive("max_model_len", self.max_model_len)
        _positive("max_num_seqs", self.max_num_seqs)
        if self.max_num_seqs > MAX_SEQS:
            raise ConfigError(f"max_num_seqs must be at most {MAX_SEQS}, got {self.max_num_seqs}")
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _positive("max_num_queued", self.max_num_queued)
        _positive("kv_cache_memory", self.kv_cache_memory, " (bytes)")
        _positive("block_size", self.block_size)
        if isinstance(self.swap_space, bool) or self.swap_space < 0:
            raise ConfigError(f"swap_space must be 0 or a number of bytes, got {self.swap_space}")
        if self.block_size & (self.block_size - 1) or self.block_size > 1024:
            raise ConfigError(
                f"block_size must be a power of two of at most 1024, got {self.block_size}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        for name in ("tensor_parallel_size", "data_parallel_size"):
            _positive(name, getattr(self, name))
            if getattr(self, name) > MAX_RANKS:
                raise ConfigError(f"{name} must be at most {MAX_RANKS}, got {getattr(self, name)}")
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if isinstance(self.speculative_config, Mapping):
            given = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", given)
        elif not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ConfigError(
                'speculative_config must be a mapping such as {"method": "ngram"}, '
                f"got {self.speculative_config!r}"
            )
        drafting = self.speculative_config
        if drafting is not None and drafting.quantization is not None:
            _one_of("quantization in speculative_config", drafting.quantization, QUANTIZATIONS)
        for kind, count in (self.limit_mm_per_prompt or {}).items():
            if kind in ("audio", "video") and count == 0:
                continue
            if kind != "image" or type(count) is not int or not 0 <= count <= MAX_IMAGES:
                raise ConfigError(
                    'limit_mm_per_prompt must be {"image": COUNT} with a count of 0 to '
                    f"{MAX_IMAGES} (audio and video are not supported), got {kind!r}: {count!r}"
                )
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            _positive(name, getattr(self, name))
        if self.max_loras > MAX_LORAS or self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(
                f"max_loras must be at most {MAX_LORAS} and max_lora_rank at most "
                f"{MAX_LORA_RANK}, got {self.max_loras} and {self.max_lora_rank}"
            )
        rank = self.max_lora_expert_rank
        if type(rank) is not int or not 0 <= rank <= MAX_LORA_RANK:
            raise ConfigError(
                f"max_lora_expert_rank must be 0 to {MAX_LORA_RANK} (0: no adapters on routed "
                f"experts), got {rank!r}"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be at least max_loras ({self.max_loras}), since an adapter "
                f"passes through host memory; got {self.max_cpu_loras}"
            )
        for size in self.cuda_graph_buckets or ():
            _positive("cuda_graph_buckets", size)
        if self.opt_level not in (None, 0, 1, 2, 3):
            raise ConfigError(f"opt_level must be 0, 1, 2 or 3, got {self.opt_level!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
