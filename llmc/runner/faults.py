"""Distinguishes errors that end the engine from errors that only end a step's requests."""

from __future__ import annotations

import torch

from llmc.errors import EngineDeadError

# After a kernel fault the device is unusable for this process: no later step can succeed.
_AcceleratorError: type[Exception] | None = getattr(torch, "AcceleratorError", None)
_CUDA_ERRORS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # told by other than torch


def classified(error: Exception) -> Exception:
    """`error` itself, or an EngineDeadError if the device cannot run any later step either.

    Running out of memory is an ordinary error, since a smaller step may fit.
    """
    if isinstance(error, EngineDeadError):
        return error
    fault = _fault() or (error if _is_fatal(error) else None)
    if fault is None:
        return error
    reason = str(fault).strip().splitlines()[0]
    return EngineDeadError(f"the device failed: {reason}; restart the engine")


def _fault() -> Exception | None:
    """The error that a kernel left on the device, whoever met it first: it would meet all others.
    Triton, for one, tells of it in words of its own."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return None


def _is_fatal(error: Exception) -> bool:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(what in text for what in _OUT_OF_MEMORY):
        return False
    is_device = _AcceleratorError is not None and isinstance(error, _AcceleratorError)
    return is_device or any(what in text for what in _CUDA_ERRORS)
