"""The name of a GPU's kind, by which measured tables are kept."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def chip_of(device: torch.device) -> str:
    """Such as "sm_90", for a compute capability of 9.0. Empty where no table can be: no GPU, or one
    of another maker.

    `llmc inspect` may ask about a GPU where there is none.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
