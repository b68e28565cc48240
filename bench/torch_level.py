"""torch with the instructions of a forced level: limits and peers are those of such a CPU."""

from __future__ import annotations

import os

from llmc.kernels.cpu.levels import VARIABLE, pick_level

_NAMES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
_MOST = {  # what each library may use, in this order
    "x86-64-v3": ("avx2", "AVX2", "AVX2"),
    "x86-64-v3-vnni": ("avx2", "AVX2", "AVX2_VNNI"),
    "x86-64-v4": ("avx512", "AVX512", "AVX512_CORE"),
    "x86-64-v4-vnni": ("avx512", "AVX512", "AVX512_CORE_VNNI"),
    "x86-64-v4-bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
}


def limit_torch() -> None:
    """If $LLMC_CPU_TARGET forces a level, keep torch, MKL and oneDNN from using more than it has.

    They read these variables when they first compute, so this has to come before. What the user has
    set stays. Raises ConfigError for an unknown or unsupported level.
    """
    if not os.environ.get(VARIABLE):
        return
    level = pick_level()
    for name, most in zip(_NAMES, _MOST.get(level.name, ()) if level else (), strict=False):
        os.environ.setdefault(name, most)
