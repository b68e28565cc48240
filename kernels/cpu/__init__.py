"""Ops in C++ for CPUs, built once with the C++ compiler that Inductor needs anyway.

Importing this package adds the C++ versions to `OPS` (impls.py); `build.load()` makes them
available. It also adds the torch version for CPUs (widen_linear.py).
"""

from llmc.kernels.cpu import widen_linear
from llmc.kernels.cpu.impls import register_impls

__all__ = ["register_impls", "widen_linear"]

register_impls()
