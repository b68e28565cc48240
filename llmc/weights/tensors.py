"""Opens the tensors of a model directory, in whichever format they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from llmc.cache_dir import cache_dir
from llmc.weights.checkpoint import Readable, open_checkpoint
from llmc.weights.gguf.files import gguf_files, is_gguf
from llmc.weights.pickled import converted, pickled_files
from llmc.weights.quantized.quantization_config import StoredQuantization
from llmc.weights.quantized.stored_weights import dequantized


def open_tensors(
    folder: Path, stored: StoredQuantization | None, dtype: torch.dtype
) -> dict[str, Readable]:
    """The tensors by name; no weight is read yet. Quantized ones will be read in `dtype`.

    Raises CheckpointError for files that are missing, truncated or inconsistent.
    """
    if is_gguf(folder):
        from llmc.weights.gguf.model import open_gguf

        found = open_gguf(folder).items()
        return {name: dataclasses.replace(tensor, dtype=dtype) for name, tensor in found}
    if pickled := pickled_files(folder):
        folder = converted(pickled, cache_dir())
    return dequantized(open_checkpoint(folder), stored, dtype)


def weight_files(folder: Path) -> Iterable[Path]:
    if is_gguf(folder):
        return gguf_files(folder)
    return pickled_files(folder) or sorted(folder.glob("*.safetensors"))
