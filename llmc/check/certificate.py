"""The certificate: what was compared and what came of it, as JSON beside the compile cache.

Named by a key of everything that the comparison depends on: the program (config, code, passes,
versions), the kernels, the machine, the level and the weights. Written aside and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import llmc.kernels
from llmc.cache_dir import write_whole
from llmc.check.bisect import Culprit
from llmc.check.compare import LogitsDeviation, Tolerance
from llmc.kernels.cpu.levels import cpu_model, pick_level
from llmc.weights.tensors import open_tensors, weight_files

log = logging.getLogger(__name__)

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16  # of each tensor file


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The hidden state behind one layer; `limit` is what its relative error may be."""

    layer: int
    max_abs: float
    relative: float
    limit: float

    @property
    def is_good(self) -> bool:
        return self.relative <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedResult:
    """A pass that means to change the model, or that rounds; `beside`: what the step is compared
    with, the captured graph with the pass, or the step without it."""

    name: str
    beside: str
    logits: LogitsDeviation
    limit: Tolerance
    is_good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """`certified` says that this step may serve. Errors are relative to `compared_with`."""

    key: str
    certified: bool
    created: str  # ISO 8601, UTC
    model: str
    architecture: str
    dtype: str
    device: str
    opt_level: int
    weights: str  # fingerprint
    adapters: tuple[str, ...]  # LoRA adapters that some of the sequences had: name and digest
    versions: Mapping[str, str]
    passes: Mapping[str, bool]
    kernels: Mapping[str, str]
    compared_with: str
    num_sequences: int
    num_tokens: int
    num_steps: int
    longest_prompt: int
    limit: Tolerance
    noise: LogitsDeviation | None  # of the model's own rounding
    logits: LogitsDeviation
    compiled: LogitsDeviation | None  # the same at -O1 and above
    float32: LogitsDeviation | None  # the same rewrite, computed in float32
    float32_limit: Tolerance | None
    layers: tuple[LayerResult, ...]
    changed: tuple[ChangedResult, ...]
    culprits: tuple[Culprit, ...]
    is_fixable: bool  # without the culprits that have a switch the step is right
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def switches(self) -> tuple[str, ...]:
        """What to type to serve without the culprits."""
        return tuple(c.switch for c in self.culprits if c.switch)


def from_json(text: str) -> Certificate:
    """Raises ValueError, KeyError or TypeError for foreign data."""
    data: dict[str, Any] = json.loads(text)

    def logits(found: Any) -> LogitsDeviation | None:
        return None if found is None else LogitsDeviation(**found)

    known = {
        "limit": Tolerance(**data["limit"]),
        "noise": logits(data["noise"]),
        "logits": LogitsDeviation(**data["logits"]),
        "compiled": logits(data["compiled"]),
        "float32": logits(data["float32"]),
        "float32_limit": data["float32_limit"] and Tolerance(**data["float32_limit"]),
        "layers": tuple(LayerResult(**x) for x in data["layers"]),
        "changed": tuple(
            ChangedResult(
                **{
                    **x,
                    "logits": LogitsDeviation(**x["logits"]),
                    "limit": Tolerance(**x["limit"]),
                }
            )
            for x in data["changed"]
        ),
        "culprits": tuple(Culprit(**x) for x in data["culprits"]),
        "adapters": tuple(data["adapters"]),
        "notes": tuple(data["notes"]),
    }
    return Certificate(**{**data, **known})


class CertificateStore:
    """Files under `root`/certificates, one a key."""

    def __init__(self, root: Path) -> None:
        self._root = root / "certificates"

    def path(self, key: str) -> Path:
        return self._root / f"{key}.json"

    def load(self, key: str) -> Certificate | None:
        """None where there is none, or none that can be read, or that another user owns."""
        path = self.path(key)
        try:
            if path.stat().st_uid != os.getuid():
                return None
            found = from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("a certificate can't be read (%s) and is made again", e)
            return None
        return found if found.key == key else None

    def save(self, certificate: Certificate) -> Path | None:
        """Where it lies; None (and a warning) on a full or read-only disk."""
        path = self.path(certificate.key)
        try:
            write_whole(path, certificate.to_json())
        except OSError as e:
            log.warning("the certificate can't be kept: %s", e)
            return None
        return path


def _processor() -> str:
    """The processor and the level of instructions that the kernels use of it."""
    level = pick_level()
    return f"{cpu_model()}\n{level.name if level else 'references'}"


def certificate_key(program: str, weights: str, device: torch.device, level: int) -> str:
    """`program` is the program's own key (compiler/cache.py)."""
    machine = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    parts = (program, weights, machine, str(level), _kernels_digest())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _kernels_digest() -> str:
    """Of the kernels' sources in every language."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in llmc.kernels.__path__:
        for file in sorted(Path(folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """Of a checkpoint: names, shapes and places of all tensors, and samples of every file's bytes.

    Reads 16 pieces of 64 KiB a file, so it takes no longer for a large model.
    """
    tensors = open_tensors(path, None, torch.float32)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
    for file in weight_files(path):
        for piece in _samples(file):
            digest.update(piece)
    return digest.hexdigest()


def _samples(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    with file.open("rb") as data:
        for i in range(_SAMPLES):
            data.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            yield data.read(_SAMPLE_BYTES)
