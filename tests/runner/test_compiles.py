"""CompileWatch: compilations inside a launch are counted, all others are not."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo

from llmc.runner.compiles import CompileWatch


def compile_something() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    out = torch.compile(double, backend="eager")(torch.ones(3))
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_a_compilation_inside_a_launch_is_counted() -> None:
    watch = CompileWatch()
    with watch.launching():
        compile_something()
    assert watch.num_compiles == 1
    torch._dynamo.reset()
    with watch.launching():
        compile_something()
    assert watch.num_compiles == 2


def test_compilations_before_after_and_beside_are_not() -> None:
    watch, other = CompileWatch(), CompileWatch()
    compile_something()
    with watch.launching():
        beside = threading.Thread(target=compile_something)
        beside.start()
        beside.join()
    compile_something()
    assert watch.num_compiles == other.num_compiles == 0


def test_triton_tells_of_its_compilations() -> None:
    knobs = pytest.importorskip("triton.knobs", reason="triton is not installed")
    watch = CompileWatch()
    with watch.launching():
        knobs.runtime.jit_post_compile_hook(key="k", repr="kernel[num_warps=4]")
    assert watch.num_compiles == 1
