"""Whether a model's architecture was compared with transformers, kept for the next start.

`llmc serve` has the comparison made beside the server (llmc/check/background.py), once for each
architecture and version. Here is what came of it: read at start, where passes that make a
difference are switched off, and by `/v1/models`. Imports neither torch nor transformers.
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

from llmc.cache_dir import cache_dir, write_whole
from llmc.model_info import ModelInfo

if TYPE_CHECKING:
    from llmc.startup.resolve import ModelSource

log = logging.getLogger(__name__)

Status = Literal["certified", "different", "not checked"]
_STATUSES = ("certified", "different", "not checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureCertificate:
    """`reason` names what makes a difference, or why nothing was compared.

    `fixed_by` are the passes without which the model is right.
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
        """Raises ValueError, KeyError or TypeError for foreign data."""
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
            return "certified: a small model of this architecture computes what transformers does"
        if self.status == "not checked":
            return f"this architecture was not compared with transformers: {self.reason}"
        way = (
            f"the next start leaves out {', '.join(self.fixed_by)}, which cures it"
            if self.fixed_by
            else "no switch cures it: please report this model"
        )
        return (
            "a small model of this architecture does NOT compute what transformers does "
            f"({self.reason or 'no cause was found'}); {way}"
        )


class ArchitectureCertificates:
    """Files under `root`/certificates/architectures, one a key."""

    def __init__(self, root: Path) -> None:
        self._root = root / "certificates" / "architectures"

    def load(self, key: str) -> ArchitectureCertificate | None:
        """None where there is none, or none that can be read, or that another user owns."""
        path = self._root / f"{key}.json"
        try:
            if not key or path.stat().st_uid != os.getuid():
                return None
            return ArchitectureCertificate.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("%s can't be read (%s) and is made again", path, e)
            return None

    def save(self, key: str, certificate: ArchitectureCertificate) -> None:
        """Written aside and renamed; a full or read-only disk is a warning."""
        try:
            write_whole(self._root / f"{key}.json", certificate.to_json())
        except OSError as e:
            log.warning("the certificate of this architecture can't be kept: %s", e)


def architecture_key(source: ModelSource) -> str:
    """Names an architecture, what is done to it and by which code; "" where nothing can be kept.

    Sizes are in it: a config is read in no time, and the check itself looks for what it has
    found of another one that shrinks to the same.
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


def without_culprits(
    source: ModelSource, known: ArchitectureCertificate | None
) -> tuple[ModelSource, tuple[str, ...]]:
    """The source with the passes switched off that make its architecture wrong, and their names.

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
    """For `/v1/models`. `is_checked`: a check runs, or has run, beside this server."""
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
    """Digest of the sources that a program's key leaves out: of the check and of C++."""
    import llmc.kernels

    files = sorted((Path(__file__).parents[1] / "check").glob("*.py"))
    for folder in llmc.kernels.__path__:
        files += sorted(p for p in Path(folder).rglob("*") if p.suffix in (".cpp", ".h"))
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
