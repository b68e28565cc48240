"""Levels of instructions: which one a processor gets, and what LLMC_CPU_TARGET may name."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import quick_compiler
from quick_compiler import WHEEL_LEVELS

from llmc.errors import ConfigError
from llmc.kernels.cpu import build, compile, levels
from llmc.kernels.cpu.levels import AARCH64, X86_64, Level, pick_level, supported

NEEDS = {level.name: level.needs for level in X86_64}
ZEN4 = NEEDS["x86-64-v4-bf16"] | {"sse2", "aes"}
INTEL = ZEN4 | {"avx512_fp16"}  # Sapphire Rapids whose tiles are hidden from a virtual machine


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    yield monkeypatch


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, **facts: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(levels, "cpu_facts", lambda: facts)


@pytest.mark.parametrize(
    "machine,facts,name",
    [
        ("x86_64", {"flags": " ".join(NEEDS["x86-64-v3"])}, "x86-64-v3"),
        ("x86_64", {"flags": " ".join(NEEDS["x86-64-v3-vnni"])}, "x86-64-v3-vnni"),
        ("AMD64", {"flags": " ".join(NEEDS["x86-64-v4"])}, "x86-64-v4"),
        ("x86_64", {"flags": " ".join(ZEN4)}, "x86-64-v4-bf16"),
        ("x86_64", {"flags": " ".join(ZEN4 - {"avx512_vnni"})}, "x86-64-v4"),
        ("x86_64", {"flags": " ".join(ZEN4 - {"avx512bw"})}, "x86-64-v3"),
        ("x86_64", {"flags": " ".join(NEEDS["x86-64-v4-amx"])}, "x86-64-v4-amx"),
        ("x86_64", {"flags": " ".join(INTEL), "vendor_id": "GenuineIntel"}, "x86-64-v4-vnni"),
        ("x86_64", {"flags": " ".join(INTEL), "vendor_id": "AuthenticAMD"}, "x86-64-v4-bf16"),
        (
            "x86_64",
            {"flags": " ".join(INTEL | NEEDS["x86-64-v4-amx"]), "vendor_id": "GenuineIntel"},
            "x86-64-v4-amx",
        ),
        (
            "x86_64",
            {"flags": " ".join(ZEN4 - {"avx_vnni"}), "vendor_id": "GenuineIntel"},
            "x86-64-v4-bf16",  # Cooper Lake
        ),
        ("x86_64", {"flags": "sse2 avx"}, None),
        ("x86_64", {}, None),
        ("aarch64", {"Features": "fp asimd"}, "aarch64"),
        ("aarch64", {"Features": "asimd asimddp i8mm bf16"}, "aarch64-bf16"),
        ("arm64", {}, "aarch64"),
        ("riscv64", {}, None),
    ],
)
def test_the_fastest_level_of_a_processor(
    processor: pytest.MonkeyPatch, machine: str, facts: dict[str, str], name: str | None
) -> None:
    pretend(processor, machine, **facts)
    level = pick_level()
    assert (level.name if level else None) == name


def test_a_lower_level_can_be_asked_for(processor: pytest.MonkeyPatch) -> None:
    pretend(processor, "x86_64", flags=" ".join(ZEN4))
    processor.setenv(levels.VARIABLE, "x86-64-v3")
    assert pick_level() == X86_64[0]


@pytest.mark.parametrize(
    "given,reason",
    [
        ("native", "LLMC_CPU_TARGET=native is not an instruction set level"),
        ("x86-64-v4-amx", "LLMC_CPU_TARGET=x86-64-v4-amx is not supported by this processor"),
        ("aarch64", "is not supported by this processor"),
    ],
)
def test_a_wrong_level_is_refused(processor: pytest.MonkeyPatch, given: str, reason: str) -> None:
    pretend(processor, "x86_64", flags=" ".join(NEEDS["x86-64-v4"]))
    processor.setenv(levels.VARIABLE, given)
    with pytest.raises(ConfigError, match=f"{reason}.*supports: x86-64-v3, x86-64-v4; or unset"):
        build.start_build()


def test_levels_contain_each_other() -> None:
    assert NEEDS["x86-64-v3"] < NEEDS["x86-64-v3-vnni"], "a side branch: AVX-512 came first"
    x86_64 = [level for level in X86_64 if level.name != "x86-64-v3-vnni"]
    for ladder in (x86_64, AARCH64):
        for lower, higher in zip(ladder, ladder[1:], strict=False):
            assert lower.needs < higher.needs


def test_this_machine_has_what_its_levels_need() -> None:
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        pytest.skip(f"no levels are known for {machine}")
    assert pick_level() is None or pick_level() in supported()


def compilers() -> list[tuple[str, Level]]:
    """Each level that no other test compiles, with a compiler for it: this machine's, or Debian's
    for the other kind. test_wheel.py compiles the first ones, and test_cpu_targets.py those that
    this machine supports."""
    kinds = {"x86_64": X86_64, "aarch64": AARCH64}
    mine = kinds.pop(platform.machine(), ())
    if supported():
        mine = tuple(level for level in mine[WHEEL_LEVELS:] if level not in supported())
    other = [(f"{kind}-linux-gnu-g++", level) for kind, all in kinds.items() for level in all]
    return [("", level) for level in mine] + other


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler,level", compilers(), ids=lambda x: getattr(x, "name", ""))
def test_every_level_compiles(
    compiler: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler and shutil.which("qemu-aarch64"):
        pytest.skip("test_ops_aarch64.py compiles it, and runs it too")
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    toolchain = compile.find_toolchain()
    if toolchain is None:
        pytest.skip(f"{compiler or 'a C++ compiler'} is not installed")
    toolchain = quick_compiler.make(tmp_path, toolchain)
    assert compile.compile_headers(toolchain, tmp_path, [level]) is None
    commands = [
        compile.object_command(
            toolchain, source, tmp_path / f"{source.stem}.o", [level], headers=tmp_path
        )
        for source in compile.kernel_sources()
    ]
    assert compile.run_all(commands, tmp_path, None) is None
    tables = tmp_path / "table.o"
    assert level.symbol.encode() in tables.read_bytes()
