"""Which files of a model's directory are weights. Needs no torch: errors come at once."""

from __future__ import annotations

from pathlib import Path

from llmc.errors import CheckpointError

PICKLED = ("bin", "pt", "pth")
_INDEX = "model.safetensors.index.json"


def check_has_weights(path: Path) -> None:
    """Raises CheckpointError if a directory has no weights in safetensors or pickled."""
    kinds = ("safetensors", *PICKLED)
    if not (path / _INDEX).is_file() and not any(any(path.glob(f"*.{kind}")) for kind in kinds):
        raise no_weights(path)


def no_weights(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} has no model.safetensors and no {_INDEX}; use --load-format dummy to run "
        "on random weights"
    )
