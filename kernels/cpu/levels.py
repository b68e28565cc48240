"""Instruction sets that the C++ kernels are built for, and which of them this machine uses.

A level is a set of compiler flags and the CPU features that it requires. The highest level that the
processor supports is used, unless a lower one is faster; LLMC_CPU_TARGET selects another. Features
are read from the Linux kernel's list, which omits those that the operating system does not let
programs use.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from llmc.errors import ConfigError

VARIABLE = "LLMC_CPU_TARGET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One instruction set level. `needs`: the required features, as named in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    @property
    def symbol(self) -> str:
        """The name of the level's kernel table in the library."""
        return "llmc_kernels_" + self.name.replace("-", "_")


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V3_VNNI = _V3 | {"avx_vnni"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni", "avx512vbmi"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_V3_FLAGS = ("-march=x86-64-v3",)
_V4_FLAGS = ("-march=x86-64-v4",)
_VNNI_FLAGS = (*_V4_FLAGS, "-mavx512vnni", "-mavx512vbmi")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_PAIRS = "x86-64-v4-bf16"

X86_64 = (  # the best last; each level includes the previous one, but AVX-512 came before AVX-VNNI
    Level(name="x86-64-v3", flags=_V3_FLAGS, needs=_V3),
    Level(name="x86-64-v3-vnni", flags=(*_V3_FLAGS, "-mavxvnni"), needs=_V3_VNNI),
    Level(name="x86-64-v4", flags=_V4_FLAGS, needs=_V4),
    Level(name="x86-64-v4-vnni", flags=_VNNI_FLAGS, needs=_VNNI),
    Level(name=_PAIRS, flags=_BF16_FLAGS, needs=_BF16),
    Level(name="x86-64-v4-amx", flags=_AMX_FLAGS, needs=_AMX),
)
AARCH64 = (
    Level(name="aarch64", flags=("-march=armv8-a",), needs=frozenset()),
    Level(
        name="aarch64-bf16",
        flags=("-march=armv8.2-a+dotprod+bf16+i8mm",),
        needs=frozenset({"asimddp", "bf16", "i8mm"}),
    ),
)
_LADDERS = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def ladder(machine: str) -> tuple[Level, ...]:
    """The levels of an architecture, lowest first; empty if there are no kernels for it."""
    return _LADDERS.get(machine.lower(), ())


@cache
def cpu_facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first processor; empty if the file does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in reversed(text.splitlines()))
    return {name.strip(): value.strip() for name, _, value in lines if value}


def cpu_model() -> str:
    """The processor's name and its instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found = [f"{name}: {cpu_facts()[name]}" for name in wanted if name in cpu_facts()]
    return "\n".join(found) or f"{platform.machine()} {platform.processor()}"


def supported() -> tuple[Level, ...]:
    """The levels that this processor supports; empty if it does not support the lowest."""
    facts = cpu_facts()
    features = frozenset(facts.get("flags", facts.get("Features", "")).split())
    return tuple(level for level in ladder(platform.machine()) if level.needs <= features)


def _multiplies_pairs_slowly() -> bool:
    """Whether products of bfloat16 pairs take longer than those of floats.

    Intel's cores since Sapphire Rapids start one every other cycle, and two products of as many
    floats each cycle. They are meant to use tiles, which virtual machines may not have.
    """
    facts = cpu_facts()
    is_late = "avx512_fp16" in facts.get("flags", "").split()
    return is_late and facts.get("vendor_id") == "GenuineIntel"


def multiplies_integers() -> bool:
    """Whether the kernels of the current level support inputs rounded to integers."""
    return pick_level() in X86_64


def multiplies_bfloat16() -> bool:
    """Whether the current level has bfloat16 multiply instructions."""
    level = pick_level()
    return level is not None and not level.needs.isdisjoint({"avx512_bf16", "bf16"})


def emulates(dtype: Literal["bf16", "fp16"]) -> bool:
    """Whether this is an x86 processor without instructions that multiply this type.

    Unlike the level, this is about what torch uses, which does not follow $LLMC_CPU_TARGET.
    """
    flags = cpu_facts().get("flags", "").split()  # "Features" of others
    return bool(flags) and f"avx512_{dtype}" not in flags


def pick_level() -> Level | None:
    """The level named by $LLMC_CPU_TARGET, else the fastest supported one; None if there is none.

    Raises ConfigError for an unknown name, or a level that this processor does not support.
    """
    usable = supported()
    given = os.environ.get(VARIABLE)
    if not given:
        best = [level for level in usable if level.name != _PAIRS or not _multiplies_pairs_slowly()]
        return best[-1] if best else None
    for level in usable:
        if level.name == given:
            return level
    known = any(level.name == given for level in (*X86_64, *AARCH64))
    wrong = "is not supported by this processor" if known else "is not an instruction set level"
    names = ", ".join(level.name for level in usable) or "none"
    raise ConfigError(f"{VARIABLE}={given} {wrong}; it supports: {names}; or unset {VARIABLE}")
