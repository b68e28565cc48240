"""Where the tests of tests/gpu run: on the GPU, or as a dry run on the CPU.

LLMC_GPU_DRY_RUN=1 runs those with `dry_run` in their names without a GPU, to check that they work
before a GPU is available (`python -m bench.gpu --tiny` does this).
"""

from __future__ import annotations

import os

import pytest
import torch

DRY_RUN = os.environ.get("LLMC_GPU_DRY_RUN") == "1"
# read when CUDA starts: without it torch's products fail when memory is poisoned
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = torch.device("cpu" if DRY_RUN else "cuda")
LEVELS = (0,) if DRY_RUN else (1, 2)  # the default, and with Inductor

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (DRY_RUN or torch.cuda.is_available()),
        reason="needs a CUDA device, and torch sees none",
    ),
]
