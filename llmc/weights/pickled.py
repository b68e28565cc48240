"""Weights in torch's pickled format (.bin) -> safetensors in the cache, converted once.

A pickle can run code when it is loaded. So it is loaded by torch's restricted loader, which allows
only tensors, in a child process with limits on memory, time and disk:
`python -P -m llmc.weights.pickled FILE OUT`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from llmc.cache_dir import new_folder, publish_folder
from llmc.errors import CheckpointError, reason_of
from llmc.resource_limits import limit_resources

_MAX_SECONDS = 1800
_SPARE_BYTES = 16 << 30  # of address space, for torch itself


def pickled_files(folder: Path) -> list[Path]:
    """The pickled weight files of a directory that has no other weights."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return []
    return sorted(folder.glob("pytorch_model*.bin"))


def converted(files: list[Path], cache: Path) -> Path:
    """A directory with the same tensors as safetensors. CheckpointError if they can't be read."""
    made = cache / "safetensors" / key_of(files)
    if made.is_dir():
        return made
    with new_folder(made.parent) as folder:
        names: dict[str, str] = {}
        for number, file in enumerate(files):
            out = f"model-{number:05d}.safetensors"
            found = convert(file, folder / out)
            if repeated := sorted(names.keys() & found):
                raise CheckpointError(f"{file.name} repeats tensor {repeated[0]!r}")
            names.update(dict.fromkeys(found, out))
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        publish_folder(folder, made)
    return made


def key_of(files: Iterable[Path]) -> str:
    """A key of the files as they are now, by their paths, sizes and times. OSError without one."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:32]


def convert(file: Path, out: Path) -> list[str]:
    """Convert a file's tensors to `out`; returns their names. CheckpointError if it can't be
    read."""
    command = [sys.executable, "-P", "-m", __name__, str(file.resolve()), str(out)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise CheckpointError(f"{file.name} took more than {_MAX_SECONDS} s to read") from e
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0:
            return list(answer["names"])
        reason = str(answer["error"])
    except (ValueError, KeyError, IndexError, TypeError):
        reason = f"its reader exited with code {done.returncode}"
    raise CheckpointError(
        f"{file.name} can't be read as plain tensors: {reason}; use a checkpoint in safetensors"
    )


def main(source: str, out: str) -> int:
    """The child process: prints one line of JSON."""
    import torch
    from safetensors.torch import save_file

    size = os.path.getsize(source)
    # a few copies of the file in memory, two on disk
    limit_resources(AS=_SPARE_BYTES + 4 * size, FSIZE=(64 << 20) + 2 * size, CPU=_MAX_SECONDS)
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
        if not isinstance(loaded, dict):
            raise ValueError(f"it contains a {type(loaded).__name__} instead of tensors by name")
        tensors = {str(n): t.clone().contiguous() for n, t in loaded.items() if _is_plain(t)}
        if len(tensors) != len(loaded):
            raise ValueError("it contains objects other than tensors")
        save_file(tensors, out, metadata={"format": "pt"})
    except Exception as e:  # a malformed file can make the loader raise anything
        sys.stdout.write(json.dumps({"error": _reason(e)}) + "\n")
        return 1
    sys.stdout.write(json.dumps({"names": list(tensors)}) + "\n")
    return 0


def _reason(error: Exception) -> str:
    """What is wrong with the file, without torch's advice to load it unsafely."""
    advice, *others = str(error).splitlines() or [""]
    if "weights_only" not in advice:
        return reason_of(error)
    said = [line.strip() for line in others if line.strip()]
    said = [line for line in said if not line.startswith(("Please file", "Check the doc"))]
    return reason_of(ValueError(said[0])) if said else "it is not a file of tensors"


def _is_plain(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
