"""LoRA adapters whose weights are pickled, as older versions of PEFT saved them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from llmc.cache_dir import cache_dir, new_folder, publish_folder
from llmc.errors import CheckpointError, InvalidRequestError, reason_of
from llmc.lora_request import LoRARequest
from llmc.weights.pickled import convert, key_of
from llmc.weights.weight_files import ADAPTER, ADAPTER_CONFIG


def in_safetensors(adapter: LoRARequest) -> LoRARequest:
    """The adapter, from a directory in the cache if its own has pickled weights alone. The first
    time, that takes seconds. InvalidRequestError if they can't be read."""
    folder, file = Path(adapter.lora_path), f"{ADAPTER}.safetensors"
    pickled, config = folder / f"{ADAPTER}.bin", folder / ADAPTER_CONFIG
    try:
        if (folder / file).exists() or not (pickled.is_file() and config.is_file()):
            return adapter
        made = cache_dir() / "adapters" / key_of((pickled, config))
        if not made.is_dir():
            with new_folder(made.parent) as new:
                convert(pickled, new / file)
                shutil.copyfile(config, new / ADAPTER_CONFIG)
                publish_folder(new, made)
    except (CheckpointError, OSError) as error:
        raise InvalidRequestError(
            f"the LoRA adapter {adapter.lora_name!r} can't be used: {reason_of(error)}",
            param="lora_request",
        ) from error
    return replace(adapter, lora_path=str(made))
