"""Where the tests of tests/gpu run: on the GPU, or, rehearsed, on the CPU.

LLMC_REHEARSE_GPU=1 runs those whose names say `rehearsed` with everything but the GPU, so that
they are known to work before a GPU is there (`python -m bench.gpu --tiny` does it).
"""

from __future__ import annotations

import os

import pytest
import torch

REHEARSED = os.environ.get("LLMC_REHEARSE_GPU") == "1"
# read when CUDA starts: without it torch's products refuse to run where memory is poisoned
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = torch.device("cpu" if REHEARSED else "cuda")
LEVEL = 0 if REHEARSED else 2

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSED or torch.cuda.is_available()),
        reason="needs a CUDA device, and torch sees none",
    ),
]
