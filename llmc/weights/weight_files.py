"""Which files of a model's directory are weights. Needs no torch: errors come at once."""

from __future__ import annotations

from pathlib import Path

from llmc.errors import CheckpointError

PICKLED = ("bin", "pt", "pth")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model"  # the stem of PEFT's weight files
_INDEX = "model.safetensors.index.json"


def check_has_weights(path: Path) -> None:
    """Raises CheckpointError if a directory has no weights in safetensors or pickled, or only those
    of an adapter."""
    kinds = ("safetensors", *PICKLED)
    if not (path / _INDEX).is_file() and not any(files_of_weights(path, kind) for kind in kinds):
        raise no_weights(path)


def files_of_weights(path: Path, kind: str) -> list[str]:
    """The names of a directory's weight files with this suffix, except an adapter's."""
    return sorted(file.name for file in path.glob(f"*.{kind}") if file.stem != ADAPTER)


def no_weights(path: Path) -> CheckpointError:
    if (path / ADAPTER_CONFIG).is_file():
        return only_an_adapter(path)
    return CheckpointError(
        f"{path.name!r} has no model.safetensors and no {_INDEX}; use --load-format dummy to run "
        "on random weights"
    )


def only_an_adapter(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} has an adapter, not a model: give the model that it was trained for, and "
        "the adapter with --lora-modules NAME=DIR; or merge it into the model"
    )
