"""A GGUF file -> a directory with the files that a model has besides its weights.

config.json, the tokenizer's files and generation_config.json are generated from the metadata once
and cached. gguf.json in the same directory says where the weights are. So a GGUF file can be used
wherever a model's directory can.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.cache_dir import cache_dir, new_folder
from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.files import INDEX, PART, all_parts

if TYPE_CHECKING:
    from llmc.weights.gguf.reader import GgufHeader, GgufTensorInfo

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type
# The defaults of the format's own engine; small models write noise without them.
_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_DENSE = re.compile(r"dense_(\d)\.weight")
_LAYOUT = 17  # version of the directory layout; directories of other versions are not used


def model_directory(path: Path, sampling: Mapping[str, float] | None = None) -> Path:
    """The directory for a file, or for the first of several parts, created if necessary.

    `sampling`: parameters to use where the file has none; default: those of _SAMPLING. Raises
    CheckpointError for a file that can't be read or served.
    """
    path = _followed(path)
    made = _made_at(path, sampling)
    if (made / INDEX).is_file():
        return made
    from llmc.weights.gguf.reader import read_header

    whole = read_header(path)  # a damaged file is refused before the imports that take seconds
    from llmc.text.gguf_tokenizer import with_special_tokens, write_tokenizer
    from llmc.weights.gguf.config import generation_config, parsed, read_config
    from llmc.weights.gguf.model import write_index
    from llmc.weights.gguf.names import map_parameters, unstacked

    header = unstacked(replace(whole, metadata=with_special_tokens(whole.metadata)))
    try:
        config = read_config(header)
    except (ArithmeticError, TypeError, ValueError, LookupError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(
            f"the metadata of {path.name} does not describe a usable model: {reason_of(e)}"
        ) from e
    hf_config = parsed(config)
    parameters = map_parameters(header, hf_config, config)
    try:
        with new_folder(made.parent) as folder:
            hf_config.save_pretrained(folder)
            own = generation_config(header)
            ends = own.get("eos_token_id", [])
            settings = {**(sampling or _SAMPLING), **own}
            (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
            try:
                write_tokenizer(header.metadata, folder, ends)
            except CheckpointError as e:
                raise CheckpointError(f"{path.name}: {e}") from e
            _write_pooling(header, folder)
            write_index(folder, header, parameters, config)
            try:
                os.rename(folder, made)
            except OSError:  # another process may have created it
                if not (made / INDEX).is_file():
                    raise
    except OSError as e:
        raise _unwritable(made.parent, e) from e
    return made


def _unwritable(cache: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"can't write to {cache}, the cache for GGUF files ({error.strerror or error}); set "
        "LLMC_CACHE_DIR to a writable folder with free space"
    )


def _write_pooling(header: GgufHeader, folder: Path) -> None:
    """Describe an embedding model's pooling as sentence-transformers does, if the file has one, and
    write the linears that follow it (dense_2, dense_3)."""
    stated = header.metadata.get(f"{header.architecture}.pooling_type")
    method = _POOLINGS.get(stated) if isinstance(stated, int) else None
    if method is None:
        return
    dense = {m[1]: t for n, t in sorted(header.tensors.items()) if (m := _DENSE.fullmatch(n))}
    paths = ["", "1_Pooling", *(f"{number}_Dense" for number in dense), "9_Normalize"]
    kinds = [path.partition("_")[2] or "Transformer" for path in paths]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = json.dumps({"pooling_mode": method})
    (folder / "1_Pooling" / "config.json").write_text(pooling, encoding="utf-8")
    for number, tensor in dense.items():
        _write_dense(tensor, folder / f"{number}_Dense")


def _write_dense(tensor: GgufTensorInfo, folder: Path) -> None:
    """Write a linear after the pooling as a Dense module."""
    from safetensors.torch import save_file

    from llmc.weights.gguf.tensors import read_matrix

    weight = read_matrix(tensor)
    folder.mkdir()
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"linear.weight": weight}, folder / "model.safetensors")


def is_new(path: Path, sampling: Mapping[str, float] | None = None) -> bool:
    """Whether `model_directory` has yet to read the file. CheckpointError if it does not exist."""
    return not (_made_at(_followed(path), sampling) / INDEX).is_file()


def _followed(path: Path) -> Path:
    """The target of a link, unless its name is not that of a part: the parts of a split model are
    then next to the link, as in the hub's cache."""
    real = path.resolve()
    return real if PART.fullmatch(real.name) else Path(os.path.abspath(path))


def _made_at(path: Path, sampling: Mapping[str, float] | None) -> Path:
    return cache_dir() / "gguf" / _key(path, sampling or {})


def _key(path: Path, sampling: Mapping[str, Any]) -> str:
    """Key of the file in its current version: a replaced file gets another directory."""
    try:
        files = all_parts(path)
        stats = [(str(f), (s := f.stat()).st_size, s.st_mtime_ns, s.st_ino) for f in files]
    except OSError as e:
        raise CheckpointError(f"{path.name} can't be read: {e}") from e
    packages = [version(name) for name in ("transformers", "gguf", "tokenizers")]
    described = json.dumps([_LAYOUT, str(path), stats, packages, dict(sampling)])
    return hashlib.sha256(described.encode()).hexdigest()[:32]
