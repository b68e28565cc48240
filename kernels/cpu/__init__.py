"""Ops in C++ for CPUs, built once with the C++ compiler that Inductor needs anyway.

Importing this package adds the C++ versions to `OPS` (impls.py); `build.load()` makes them
available.
"""

from llmc.kernels.cpu.impls import register_impls

register_impls()
