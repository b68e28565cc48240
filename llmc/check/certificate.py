"""The certificate: what was compared and the result, stored as JSON next to the compile cache.

Its key covers everything that the comparison depends on: the program (config, code, passes,
versions), the kernels, the machine, the level and the weights. Files are written atomically.
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
from llmc.cache_dir import files_digest, write_atomically
from llmc.check.bisect import Culprit, Kind
from llmc.check.compare import Average, LogitsDeviation, Tolerance
from llmc.kernels.cpu.levels import cpu_model, pick_level
from llmc.weights.tensors import open_tensors, weight_files

log = logging.getLogger(__name__)

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16  # of each tensor file


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The hidden state after one layer; `limit` is the maximum of its relative error."""

    layer: int
    max_abs: float
    relative: float
    limit: float

    @property
    def is_good(self) -> bool:
        return self.relative <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedResult:
    """A pass that changes the model on purpose or rounds, or a KV cache of a narrower dtype.
    `beside`: what the step is compared with, either the captured graph with the pass or the step
    without it. `switch`: the option to serve without it."""

    kind: Kind
    name: str
    beside: str
    switch: str
    logits: LogitsDeviation
    limit: Tolerance
    is_good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """`certified`: whether this step is fit to serve. Errors are relative to `compared_with`."""

    key: str
    certified: bool
    created: str  # ISO 8601, UTC
    model: str
    architecture: str
    dtype: str
    device: str
    opt_level: int
    weights: str  # fingerprint
    adapters: tuple[str, ...]  # LoRA adapters used by some sequences: name and digest
    versions: Mapping[str, str]
    passes: Mapping[str, bool]
    kernels: Mapping[str, str]
    compared_with: str
    num_sequences: int
    num_tokens: int
    num_steps: int
    longest_prompt: int
    average: Average  # of errors in `dtype`, over tokens; in float32 always the mean
    limit: Tolerance
    noise: LogitsDeviation | None  # of the model's own rounding
    logits: LogitsDeviation
    compiled: LogitsDeviation | None  # the same at -O2 and above
    float32: LogitsDeviation | None  # the same rewrite, computed in float32
    float32_limit: Tolerance | None
    layers: tuple[LayerResult, ...]
    changed: tuple[ChangedResult, ...]
    culprits: tuple[Culprit, ...]
    is_fixable: bool  # the step is correct without the culprits that have a switch
    notes: tuple[str, ...]
    cache_note: str = ""  # how logits differ that transformers computes with its own cache, if so

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def switches(self) -> tuple[str, ...]:
        """The command-line options to serve without the culprits."""
        return tuple(c.switch for c in self.culprits if c.switch)


def from_json(text: str) -> Certificate:
    """Parse a certificate. Raises ValueError, KeyError or TypeError for invalid data."""
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
    """Certificates as files under `root`/certificates, one per key."""

    def __init__(self, root: Path) -> None:
        self._root = root / "certificates"

    def path(self, key: str) -> Path:
        return self._root / f"{key}.json"

    def load(self, key: str) -> Certificate | None:
        """The certificate; None if it does not exist, can't be read or belongs to another user."""
        path = self.path(key)
        try:
            if path.stat().st_uid != os.getuid():
                return None
            found = from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("a certificate can't be read and will be recreated: %s", e)
            return None
        return found if found.key == key else None

    def save(self, certificate: Certificate) -> Path | None:
        """Save a certificate; returns its path, or None (with a warning) if it can't be written."""
        path = self.path(certificate.key)
        try:
            write_atomically(path, certificate.to_json())
        except OSError as e:
            log.warning("the certificate can't be saved: %s", e)
            return None
        return path


def _processor() -> str:
    """The processor model and the instruction-set level that the kernels use."""
    level = pick_level()
    return f"{cpu_model()}\n{level.name if level else 'references'}"


def certificate_key(program: str, weights: str, device: torch.device, level: int) -> str:
    """The key of a certificate. `program` is the program's own key (compiler/cache.py)."""
    machine = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    parts = (program, weights, machine, str(level), _kernels_digest())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _kernels_digest() -> str:
    """A digest of the kernels' sources in every language."""
    files = (file for folder in llmc.kernels.__path__ for file in sorted(Path(folder).rglob("*")))
    return files_digest(file for file in files if file.suffix in (".py", ".cpp", ".h"))


def fingerprint(path: Path) -> str:
    """A checkpoint's fingerprint: name, dtype and shape of all tensors, and samples of each file.

    Reads 16 pieces of 64 KiB per file, so it takes no longer for a large model.
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
