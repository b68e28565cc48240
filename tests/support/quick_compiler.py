"""A C++ compiler that takes a third of the time: the large headers are compiled once a level.

Parsing them is most of what a file costs that is not optimized. With `optimized=False` files are
compiled at -O0, which still checks every instruction against its level; -O3 is what the library
in use here is built with.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from llmc.kernels.cpu import compile
from llmc.kernels.cpu.levels import Level

WHEEL_LEVELS = 2  # of this machine's, the lowest: what tests/kernels/test_wheel.py compiles
HEADERS = """
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
"""
SCRIPT = """#!/bin/sh
for argument; do
    shift
    case "$argument" in
        -O3) argument={optimization} ;;
        -DLLMC_TABLE=*) set -- "$@" -include "{folder}/${{argument#-DLLMC_TABLE=}}/headers.h" ;;
    esac
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""


def make(
    folder: Path, toolchain: compile.Toolchain, levels: Sequence[Level], *, optimized: bool
) -> compile.Toolchain:
    """The toolchain for these levels, a script in `folder`. A compiler that can't use the headers
    of another kind reads them as they are written."""
    script = folder / "c++"
    script.write_text(
        SCRIPT.format(
            optimization="-O3" if optimized else "-O0",
            folder=folder,
            compiler=shlex.join(toolchain.compiler),
        )
    )
    script.chmod(0o755)
    kernel = compile.kernel_sources()[0]
    commands = []
    for level in levels:
        headers = folder / level.symbol / "headers.h"
        headers.parent.mkdir()
        headers.write_text(HEADERS)
        command = compile.object_command(toolchain, kernel, headers.with_suffix(".h.gch"), [level])
        if not optimized:
            command[command.index("-O3")] = "-O0"
        command[command.index("-c")] = "-xc++-header"
        command[command.index(str(kernel))] = str(headers)
        commands.append(command)
    assert compile.run_all(commands, folder, None) is None
    return compile.Toolchain(compiler=(str(script),), version=toolchain.version)
