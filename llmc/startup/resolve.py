"""What an EngineConfig leaves open is chosen here: device, dtype, level, context, end tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.startup.model_files import ModelFiles, generation_defaults

if TYPE_CHECKING:
    import torch

_SENSES = ("vision", "image", "video", "audio", "speech")
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU; use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, hf_config: Any) -> torch.dtype:
    """`auto` is the checkpoint's dtype, which weights and caches keep in memory.

    CPUs without products of bfloat16 or float16 widen it in registers.
    """
    import torch

    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(hf_config, "dtype", None) or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored, torch.float32)
    known = stored in (torch.float32, torch.bfloat16, torch.float16)
    return stored if known else torch.float32


def pick_level(level: int | None, device: torch.device) -> int:
    """The optimization level that will run.

    On CPU, -O0 with C++ ops is as fast as compiled code and starts at once (bench/results).
    """
    if level is not None:
        return level
    return 2 if device.type == "cuda" else 0


def pick_async(wanted: bool | None, device: torch.device) -> bool:
    """Whether steps are planned ahead of results.

    On a GPU it hides the host's work. On CPU there is little to hide, the same cores compute, and
    a stop that the plan did not foresee costs a row of a step.
    """
    return device.type == "cuda" if wanted is None else wanted


def model_context(hf_config: Any) -> int:
    """Longest context that config.json states, 2048 where it states none."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    context = 2048
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            context = value
            break
    return min(context, dense_context(hf_config) or context)


def unused_parts(hf_config: Any) -> tuple[str, ...]:
    """What a model has besides its text part, by the names of their configs."""
    names = [name.removesuffix("_config") for name in getattr(hf_config, "sub_configs", {})]
    return tuple(n for n in names if n in _SENSES and getattr(hf_config, f"{n}_config", None))


def dense_context(hf_config: Any) -> int | None:
    """Tokens up to which a sparse indexer chooses every key, so that attention is exact when dense.

    None for models without an indexer.
    """
    from llmc.compiler.interface import INDEXER_BUDGETS

    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    for name in INDEXER_BUDGETS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_model_len(config: EngineConfig, hf_config: Any) -> None:
    limit = model_context(hf_config)
    if config.max_model_len is not None and config.max_model_len > limit:
        dense = dense_context(hf_config)
        why = ", of which a sparse indexer sees all (more is not served yet)" if dense else ""
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's context of {limit} "
            f"tokens{why}"
        )


def eos_token_ids(hf_config: Any, files: ModelFiles) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    value = generation_defaults(files).get("eos_token_id")
    if value is None:
        value = getattr(hf_config, "eos_token_id", None)
    if value is None:
        value = getattr(text, "eos_token_id", None)
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """Sampling parameters that the model's authors chose, where they are usable numbers."""
    stored = generation_defaults(files)
    if stored.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        name: stored[name]
        for name in _SAMPLING_DEFAULTS
        if isinstance(stored.get(name), int | float) and not isinstance(stored.get(name), bool)
    }
