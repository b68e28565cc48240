"""Compiles a planned launch for a target that need not exist here, and reads its resource use.

The signature is what Triton would derive from the same arguments at run time: pointers aligned to
16 bytes, integers specialized when 1 or a multiple of 16, unless the kernel says not to.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.runtime.jit import DependenciesFinder, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from llmc.kernels.triton.launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# GPUs of AMD for which kernels must be compiled too, without a budget
OTHERS = {
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
# maximum shared memory per program, in bytes
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 65536,
    "gfx90a": 65536,
    "gfx950": 160 * 1024,
    "gfx1100": 65536,
}
DEPENDENT_LAUNCH = ("sm_90", "sm_100")
COPY_ENGINE = ("sm_90", "sm_100")  # others load tiles by pointers, without descriptors
WARP_SPECIALIZATION = ("sm_100",)
FLOAT8 = ("sm_90", "sm_100")  # other targets have no float8 tensors
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


_cache_key = JITFunction.cache_key.fget


def _key_anywhere(function: Any) -> str:
    """Triton's key of a function, without where it is in its file, on which only debug information
    depends."""
    line = function.starting_line_number
    function.starting_line_number = 1
    try:
        return str(_cache_key(function))
    finally:
        function.starting_line_number = line


_add_callee = DependenciesFinder._update_hash


def _add_callee_with_key(finder: Any, callee: Any) -> None:
    """Adds what a function calls to its key. Triton adds a callee's constants only if the callee's
    own key was asked for before: keys would depend on which test came first."""
    _ = callee.cache_key
    _add_callee(finder, callee)


JITFunction.cache_key = property(_key_anywhere)
DependenciesFinder._update_hash = _add_callee_with_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    registers: int  # per thread
    spilled: int  # bytes of local memory per thread (NVIDIA), registers spilled (AMD)
    shared: int  # bytes per program


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """What Triton specializes on: types, constants, and which values are divisible by 16."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]


def variant(launch: Launch) -> str:
    """A key that is equal for launches that share one compiled kernel."""
    options = (launch.kernel.__name__, launch.num_warps, launch.num_stages)
    return f"{options} {specialize(launch, 'sm_90')}"


def specialize(launch: Launch, target: str) -> Specialization:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    values = {**launch.args, **launch.constants}
    if "PDL" in values:  # depends on the GPU that is present
        values["PDL"] = target in DEPENDENT_LAUNCH
    if "SPECIALIZE" in values:
        values["SPECIALIZE"] = values["SPECIALIZE"] and target in WARP_SPECIALIZATION
    for i, param in enumerate(launch.kernel.params):
        value = values.pop(param.name)
        aligned = False
        if param.is_constexpr or value is None or (value is True or value is False):
            kind = "constexpr"
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            kind = f"*{_TYPES[value.dtype]}"
            aligned = not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            kind = "fp32"
        elif param.do_not_specialize:
            kind = "i32"
        elif value == 1:
            kind = "constexpr"
        else:
            kind, aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        signature[param.name] = kind
        if kind == "constexpr":
            constants[param.name] = value
        if aligned:
            attrs[(i,)] = [["tt.divisibility", 16]]
    assert not values, f"{launch.kernel.__name__} has no parameters {sorted(values)}"
    return Specialization(signature=signature, constants=constants, attrs=attrs)


def is_for(launch: Launch, target: str) -> bool:
    """Whether a GPU of this kind would run it."""
    values = launch.args.values()
    if any(isinstance(v, TensorDescriptor) for v in values):
        return target in COPY_ENGINE
    is_float8 = any(
        isinstance(v, torch.Tensor) and v.dtype.itemsize == 1 and v.dtype.is_floating_point
        for v in values
    )
    return target in FLOAT8 or not is_float8


def _source(launch: Launch, target: str) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles, and with which options."""
    made = specialize(launch, target)
    options = launch.compiler_options()
    if made.constants.get("PDL"):
        options["launch_pdl"] = True
    return ASTSource(launch.kernel, made.signature, made.constants, made.attrs), options


def source_digest(launch: Launch, target: str) -> str:
    """Equal for launches that Triton compiles to equal code: its cache goes by the same things.

    These are the text of the kernel and of all that it calls, constants, types, what is divisible,
    options, and Triton's version.
    """
    source, options = _source(launch, target)
    gpu = (TARGETS | OTHERS)[target]
    text = f"{triton.__version__} {gpu} {sorted(options.items())} {source.hash()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiled_code(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel, with the code of each stage in `asm`."""
    source, options = _source(launch, target)
    found = (TARGETS | OTHERS)[target]

    def current_target() -> GPUTarget:
        return found

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    # kernels may ask what they are compiled for: by default that is the GPU that is present
    with mock.patch.object(target_info, "current_target", current_target):
        return triton.compile(source, target=found, options=options)


def compile_launch(launch: Launch, target: str) -> Use:
    compiled = compiled_code(launch, target)
    registers, spilled = (
        _amd_use(compiled.asm["amdgcn"])
        if target.startswith("gfx")
        else _nvidia_use(compiled.asm["cubin"])
    )
    return Use(registers=registers, spilled=spilled, shared=int(compiled.metadata.shared))


def machine_code(compiled: Any) -> str:
    """The instructions of a kernel compiled for an NVIDIA GPU."""
    return _read_cubin(triton.knobs.nvidia.nvdisasm.path, compiled.asm["cubin"])


def _read_cubin(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool, *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_use(cubin: bytes) -> tuple[int, int]:
    text = _read_cubin(triton.knobs.nvidia.cuobjdump.path, cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, f"cuobjdump printed no resource use: {text!r}"
    return int(found[1]), max(int(found[2]), int(found[3]))


def _amd_use(assembly: str) -> tuple[int, int]:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found, f"no .{name} in the assembly"
        return int(found[1])

    # scalar registers spill into vector ones, which costs next to nothing
    return field("vgpr_count"), field("vgpr_spill_count")
