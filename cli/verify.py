"""`llmc serve --verify`: no request is taken before the rewritten model is certified."""

from __future__ import annotations

from llmc.cli.console import note, phases, stderr_console
from llmc.config import EngineConfig
from llmc.errors import CompileError


def require_certificate(config: EngineConfig) -> None:
    """Use the certificate of an earlier `llmc check`, or check now; CompileError if it fails."""
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
    way = (
        f"serve it with {switches}" if certificate.is_fixable and switches else "leave --verify out"
    )
    error.hint = f"{way}, or see `llmc check`"  # type: ignore[attr-defined]
    raise error
