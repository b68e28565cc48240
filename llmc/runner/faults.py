"""Distinguishes errors that end the engine from errors that only end a step's requests."""

from __future__ import annotations

import torch

from llmc.errors import EngineDeadError

# After a kernel fault the device is unusable for this process: no later step can succeed.
_AcceleratorError: type[Exception] | None = getattr(torch, "AcceleratorError", None)
_CUDA_ERRORS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")


def classified(error: Exception) -> Exception:
    """`error` itself, or an EngineDeadError if the device cannot run any later step either.

    Running out of memory is an ordinary error, since a smaller step may fit.
    """
    if isinstance(error, torch.OutOfMemoryError | EngineDeadError):
        return error
    is_device = _AcceleratorError is not None and isinstance(error, _AcceleratorError)
    if is_device or any(text in str(error) for text in _CUDA_ERRORS):
        reason = str(error).strip().splitlines()[0]
        return EngineDeadError(f"the device failed: {reason}; restart the engine")
    return error
