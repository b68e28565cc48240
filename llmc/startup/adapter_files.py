"""LoRA adapters as users have them -> a directory in PEFT's format, with safetensors.

owner/name                  a repository of the hub, downloaded: PEFT's files, or a GGUF file
owner/name/FILE.gguf        this file
DIR with adapter_model.bin  converted in the cache once, as older versions of PEFT saved them
FILE.gguf, or DIR with one  converted in the cache once, for a model that is a GGUF file, too
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from llmc.cache_dir import cache_dir, new_folder, publish_folder
from llmc.errors import CheckpointError, InvalidRequestError, reason_of
from llmc.lora_request import LoRARequest
from llmc.startup.hub import HubName, download_adapter
from llmc.weights.gguf.files import INDEX, SUFFIX, is_gguf, is_gguf_file
from llmc.weights.pickled import convert, key_of
from llmc.weights.weight_files import ADAPTER, ADAPTER_CONFIG


def as_peft(adapter: LoRARequest, model: Path) -> LoRARequest:
    """The adapter in PEFT's format on this machine. `model`: the served model's directory. A
    download or a conversion takes seconds, the first time.

    InvalidRequestError if there is no usable adapter.
    """
    try:
        found = find_adapter(adapter.lora_path)
        path = _from_gguf(found, model) if found.is_file() else _from_pickled(found)
    except (CheckpointError, OSError) as error:
        raise InvalidRequestError(
            f"the LoRA adapter {adapter.lora_name!r} can't be used: {reason_of(error)}",
            param="lora_request",
        ) from error
    return replace(adapter, lora_path=str(path))


def find_adapter(path: str) -> Path:
    """The adapter's directory in PEFT's format, or its GGUF file; a hub id is downloaded.
    CheckpointError if there is none."""
    local = Path(path).expanduser()
    if not local.exists():
        name = HubName.parse(path)
        if name is not None:
            local = download_adapter(name)
    if local.is_dir() and not (local / ADAPTER_CONFIG).is_file():
        files = sorted(file for file in local.iterdir() if file.suffix.lower() == SUFFIX)
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise CheckpointError(f"{path!r:.200} has several GGUF files ({names}); name one")
        if files:
            return files[0]
    if (local / ADAPTER_CONFIG).is_file() or (local.is_file() and is_gguf_file(local)):
        return local
    raise CheckpointError(
        f"{path!r:.200} is not a directory with an {ADAPTER_CONFIG}, a GGUF file or a hub id; give "
        "a directory written by PEFT's save_pretrained, or one of the others"
    )


def rank_of(files: Path) -> int:
    """The largest rank that an adapter's files state, of what `find_adapter` found. 0: none, which
    is an error once the adapter is used. CheckpointError for a GGUF file that can't be read."""
    if files.is_file():
        from llmc.weights.gguf.reader import read_adapter

        tensors = read_adapter(files)[1]
        return max((t.shape[-1] for n, t in tensors.items() if n.endswith(".lora_b")), default=0)
    try:
        config = json.loads((files / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        stated = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, RecursionError, AttributeError):
        return 0
    return max((rank for rank in stated if type(rank) is int), default=0)


def _from_pickled(folder: Path) -> Path:
    """The same folder, unless it has pickled weights alone."""
    file, pickled = f"{ADAPTER}.safetensors", folder / f"{ADAPTER}.bin"
    if (folder / file).exists() or not pickled.is_file():
        return folder
    made = _place(pickled, folder / ADAPTER_CONFIG)
    if not made.is_dir():
        with new_folder(made.parent) as new:
            convert(pickled, new / file)
            shutil.copyfile(folder / ADAPTER_CONFIG, new / ADAPTER_CONFIG)
            publish_folder(new, made)
    return made


def _from_gguf(file: Path, model: Path) -> Path:
    if not is_gguf(model):
        raise CheckpointError(
            f"{file.name} is a GGUF file, and the served model is not; use the adapter in PEFT's "
            "format, or the model's GGUF file"
        )
    made = _place(file, model / INDEX)
    if not made.is_dir():
        from llmc.weights.gguf.adapter import convert_adapter

        with new_folder(made.parent) as new:
            convert_adapter(file, model, new)
            publish_folder(new, made)
    return made


def _place(*files: Path) -> Path:
    """Where the conversion of these files, as they are now, is kept."""
    return cache_dir() / "adapters" / key_of(files)
