"""A C++ compiler that takes a third of the time: it uses -O0, which still checks every instruction
against its level. The library used in tests is built with -O2."""

from __future__ import annotations

import shlex
from pathlib import Path

from llmc.kernels.cpu import compile

WHEEL_LEVELS = 2  # the machine's lowest levels, which tests/kernels/test_wheel.py compiles
SCRIPT = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = -O2 ] && argument=-O0
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""


def make(folder: Path, toolchain: compile.Toolchain) -> compile.Toolchain:
    """The toolchain with this compiler: a script in `folder`."""
    script = folder / "c++"
    script.write_text(SCRIPT.format(compiler=shlex.join(toolchain.compiler)))
    script.chmod(0o755)
    return compile.Toolchain(compiler=(str(script),), version=toolchain.version)
