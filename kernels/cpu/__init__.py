"""Ops in C++ for CPU, built once with the C++ compiler that Inductor needs anyway.

Importing this package lists the C++ versions in `OPS` (impls.py); `build.load()` makes them
available.
"""

from llmc.kernels.cpu.impls import register_impls

register_impls()
