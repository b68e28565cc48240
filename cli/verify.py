"""`llmc serve --verify`: accept no requests before the rewritten model is certified."""

from __future__ import annotations

from llmc.cli.console import note, phases, stderr_console
from llmc.config import EngineConfig
from llmc.errors import CompileError


def require_certificate(config: EngineConfig) -> None:
    """Certify a small model of the architecture (past every attention window), then the weights.

    Uses certificates of earlier runs, or checks now; CompileError if one fails.
    """
    _certify_architecture(config)
    console = stderr_console()
    from llmc.check.check import check_model, find_certificate

    certificate = find_certificate(config)
    if certificate is None:
        note(console, "no certificate for this model, these options and this machine: checking")
        with phases(console) as on_phase:
            certificate = check_model(config, on_phase=on_phase)
    if certificate.certified:
        note(console, f"certified on {certificate.created}", style="green")
        return
    causes = "; ".join(map(str, certificate.culprits)) or "no cause was found"
    error = CompileError(f"the rewritten model is not certified, so it is not served: {causes}")
    switches = " ".join(certificate.switches)
    way = f"serve it with {switches}" if certificate.is_fixable and switches else "remove --verify"
    error.hint = f"{way}, or see `llmc check`"  # type: ignore[attr-defined]
    raise error


def _certify_architecture(config: EngineConfig) -> None:
    console = stderr_console()
    from llmc.cache_dir import cache_dir
    from llmc.startup.architecture_certificate import (
        ArchitectureCertificates,
        architecture_key,
    )
    from llmc.startup.resolve import pick_device, resolve

    key = architecture_key(resolve(config, pick_device(config.device)))
    store = ArchitectureCertificates(cache_dir())
    found = store.load(key)
    if found is None:
        with phases(console) as on_phase:
            from llmc.check.architecture import check_architecture

            found = check_architecture(config, on_phase=on_phase)
        if key:
            store.save(key, found)
    if found.status != "different":
        note(console, str(found))
        return
    error = CompileError(f"the rewritten model is not certified, so it is not served: {found}")
    switches = " ".join(f"--disable-pass {name}" for name in found.fixed_by)
    way = f"serve it with {switches}" if switches else "remove --verify"
    error.hint = f"{way}, or see `llmc check`"  # type: ignore[attr-defined]
    raise error
