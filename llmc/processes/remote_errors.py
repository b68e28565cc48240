"""Re-raises exceptions of the engine process in the main process.

So a wrong model directory or a lack of memory looks the same with one process and with two.
"""

from __future__ import annotations

import traceback

from llmc import errors
from llmc.errors import EngineDeadError, LlmcError
from llmc.processes.wire import Failed

_KNOWN: dict[str, type[LlmcError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LlmcError)
}


def describe_failure(error: BaseException) -> Failed:
    kind = next((k.__name__ for k in type(error).__mro__ if k in _KNOWN.values()), None)
    is_system = isinstance(error, OSError) and error.errno is not None
    if kind is None:
        kind = "OSError" if is_system else type(error).__name__
    return Failed(
        kind=kind,
        message=str(error.strerror if is_system and isinstance(error, OSError) else error),
        trace="".join(traceback.format_exception(error)),
        errno=error.errno if isinstance(error, OSError) else None,
        filename=str(error.filename) if isinstance(error, OSError) and error.filename else None,
    )


def as_exception(failed: Failed) -> Exception:
    """The exception to raise. Its original traceback becomes a note, which `--debug` shows."""
    error: Exception
    if failed.kind in _KNOWN:
        error = _KNOWN[failed.kind](failed.message)
    elif failed.kind == "MemoryError":
        error = MemoryError(failed.message)
    elif failed.kind == "OSError" and failed.errno is not None:
        error = OSError(failed.errno, failed.message, failed.filename)
    else:
        error = EngineDeadError(f"the engine did not start: {summary(failed)}")
    error.add_note("in the engine process:\n" + failed.trace)
    return error


def summary(failed: Failed) -> str:
    """One line for logs and responses."""
    return " ".join(f"{failed.kind}: {failed.message}".split())[:500].rstrip(": ")
