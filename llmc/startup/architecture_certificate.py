"""Caches the result of comparing a model's architecture with transformers.

`llmc serve` runs the comparison in the background (llmc/check/background.py), once for each
architecture and version. This module stores the result. It is read at startup, where passes that
change the output are switched off, and by `/v1/models`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmc.cache_dir import cache_dir, files_digest, write_atomically
from llmc.model_info import ModelInfo

if TYPE_CHECKING:
    from llmc.startup.resolve import ModelSource

log = logging.getLogger(__name__)

Status = Literal["certified", "different", "not checked"]
_STATUSES = ("certified", "different", "not checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureCertificate:
    """The result of a comparison.

    `reason` is the cause of a difference, why nothing was compared, or a remark. `fixed_by` are the
    passes that must be left out for the output to be right.
    """

    status: Status
    reason: str = ""
    fixed_by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    created: str = ""  # ISO 8601, UTC
    seconds: float = 0.0

    @staticmethod
    def not_checked(reason: str) -> ArchitectureCertificate:
        return ArchitectureCertificate(status="not checked", reason=reason)

    @staticmethod
    def from_json(text: str) -> ArchitectureCertificate:
        """Raises ValueError, KeyError or TypeError for data in another format."""
        found = json.loads(text)
        if found["status"] not in _STATUSES:
            raise ValueError(f"its status is {found['status']!r}")
        lists = {name: tuple(found[name]) for name in ("fixed_by", "notes")}
        return ArchitectureCertificate(**{**found, **lists})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def __str__(self) -> str:
        """One line for a log or a screen."""
        if self.status == "certified":
            remark = f"; {self.reason}" if self.reason else ""
            return f"certified: a small model of this architecture matches transformers{remark}"
        if self.status == "not checked":
            return f"this architecture was not compared with transformers: {self.reason}"
        way = (
            f"the next start leaves out {', '.join(self.fixed_by)}, which fixes it"
            if self.fixed_by
            else "leaving out passes does not fix it: please report this model"
        )
        return (
            "a small model of this architecture does NOT match transformers "
            f"({self.reason or 'no cause was found'}); {way}"
        )


class ArchitectureCertificates:
    """Files under `root`/certificates/architectures, one per key."""

    def __init__(self, root: Path) -> None:
        self._root = root / "certificates" / "architectures"

    def load(self, key: str) -> ArchitectureCertificate | None:
        """None if there is none, or if it is unreadable or owned by another user."""
        path = self._root / f"{key}.json"
        try:
            if not key or path.stat().st_uid != os.getuid():
                return None
            return ArchitectureCertificate.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("%s can't be read (%s); re-creating it", path, e)
            return None

    def save(self, key: str, certificate: ArchitectureCertificate) -> None:
        """Write atomically; a full or read-only disk only logs a warning."""
        try:
            write_atomically(self._root / f"{key}.json", certificate.to_json())
        except OSError as e:
            log.warning("the certificate of this architecture can't be saved: %s", e)


def architecture_key(source: ModelSource) -> str:
    """Key of an architecture, how it is compiled, and by which code; "" if it can't be cached.

    The key includes sizes, since it has to be cheap to compute. The check itself looks for the
    result of another model that shrinks to the same small one.
    """
    import torch

    from llmc.compiler.cache import program_key
    from llmc.startup.compile import rewrite_options

    if source.config.trust_remote_code:
        return ""
    options = replace(rewrite_options(source, kept=()), processors=())
    key = program_key(source.facts.digest, torch.float32, source.device, options)
    return (
        hashlib.blake2b(f"{key} {_sources()}".encode(), digest_size=16).hexdigest() if key else ""
    )


def disable_faulty_passes(
    source: ModelSource, known: ArchitectureCertificate | None
) -> tuple[ModelSource, tuple[str, ...]]:
    """Switch off the passes that make this architecture's output wrong. -> the source, their names.

    A pass that the user has switched on stays on.
    """
    config = source.config
    off = tuple(n for n in (known.fixed_by if known else ()) if config.passes.get(n, True))
    off = tuple(n for n in off if n not in config.passes)
    if not off:
        return source, ()
    passes = {**config.passes, **dict.fromkeys(off, False)}
    return replace(source, config=replace(config, passes=passes)), off


def describe_status(info: ModelInfo, *, is_checked: bool) -> Mapping[str, Any]:
    """Describe it for `/v1/models`. `is_checked`: this server runs, or has run, a check."""
    found = ArchitectureCertificates(cache_dir()).load(info.certificate_key)
    if found is None:
        return {"status": "pending" if is_checked and info.certificate_key else "not checked"}
    shown: dict[str, Any] = {"status": found.status, "created": found.created}
    if found.reason:
        shown["reason"] = found.reason
    if info.disabled_passes and set(found.fixed_by) <= set(info.disabled_passes):
        shown |= {"status": "certified", "disabled_passes": list(info.disabled_passes)}
    return shown


@cache
def _sources() -> str:
    """Digest of the sources that a program's key does not cover: the check and the C++ ops."""
    import llmc.kernels

    files = sorted((Path(__file__).parents[1] / "check").glob("*.py"))
    for folder in llmc.kernels.__path__:
        files += sorted(p for p in Path(folder).rglob("*") if p.suffix in (".cpp", ".h"))
    return files_digest(files)
