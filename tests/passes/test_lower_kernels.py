"""lower_kernels: each op is replaced by the first preferred version that is there and fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import op_cases
import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.registry import Impl
from llmc.passes.lower_kernels import lower_kernels

X = step(torch.randn(1, 5, 16), dynamic=1)


@pytest.fixture
def impls() -> Iterator[list[Impl]]:
    """act_mul's list of versions, empty, and put back afterwards."""
    kept = list(act_mul.impls)
    act_mul.impls.clear()
    yield act_mul.impls
    act_mul.impls[:] = kept


def fast(name: str, target: Any, *, available: bool = True, fits: bool = True) -> Impl:
    return Impl(
        name=name, op=lambda: target, available=lambda: available, supports=lambda **args: fits
    )


def graph() -> torch.fx.GraphModule:
    def gated(x: Tensor) -> Tensor:
        out: Tensor = act_mul.overload(x, "silu")
        return out

    return trace(gated, x=X)


ONE, TWO = torch.ops.aten.relu.default, torch.ops.aten.neg.default  # stand-ins with other names


def test_takes_the_preferred_version(impls: list[Impl]) -> None:
    impls += [fast("one", ONE), fast("two", TWO)]
    assert ops(apply(graph(), lower_kernels(prefer=("two", "one")))[0]) == {str(TWO): 1}
    assert ops(apply(graph(), lower_kernels(prefer=("one", "two")))[0]) == {str(ONE): 1}
    assert_idempotent(graph(), lower_kernels(prefer=("one", "two")))


def test_skips_versions_that_are_not_there_or_do_not_fit(impls: list[Impl]) -> None:
    impls += [fast("one", ONE, available=False), fast("two", TWO, fits=False)]
    lowered, (report,) = apply(graph(), lower_kernels(prefer=("one", "two")))
    assert ops(lowered) == {"llmc.act_mul.default": 1}
    assert report.notes == ("1 act_mul use the slow reference",)
    impls.append(fast("three", ONE))
    assert ops(apply(graph(), lower_kernels(prefer=("one", "two", "three")))[0]) == {str(ONE): 1}


def test_a_version_that_nobody_prefers_is_not_taken(impls: list[Impl]) -> None:
    impls.append(fast("one", ONE))
    assert ops(apply(graph(), lower_kernels(prefer=()))[0]) == {"llmc.act_mul.default": 1}


def test_supports_sees_the_shapes_of_the_call(impls: list[Impl]) -> None:
    seen: list[Any] = []

    def supports(**arguments: Any) -> bool:
        seen.append(arguments)
        return True

    impls.append(Impl(name="one", op=lambda: ONE, available=lambda: True, supports=supports))
    apply(graph(), lower_kernels(prefer=("one",)))
    [arguments] = seen
    gate_up = arguments.pop("gate_up")
    assert arguments == {"act": "silu", "limit": None, "shift": 0.0, "interleaved": False}
    assert gate_up.shape[-1] == 16 and gate_up.dtype == torch.float32


def test_ops_of_torch_are_replaced_where_one_of_ours_does_the_same() -> None:
    op_cases.require_cpu_ops()

    def block(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return F.gelu(y, approximate="tanh"), F.gelu(y), F.silu(y), F.relu(y), torch.sigmoid(y)

    given = {"x": X, "w": weight("w", torch.randn(8, 16))}
    gm = trace(block, **given)
    lowered, (report,) = apply(gm, lower_kernels(prefer=("cpu",)))
    assert report.added == {"llmc_cpu.linear.default": 1, "llmc_cpu.activate.default": 4}
    assert ops(lowered)["aten.sigmoid.default"] == 1
    assert_same(lowered, gm, Values.of(**given), 1e-5)
    assert ops(apply(gm, lower_kernels(prefer=()))[0]) == ops(gm)
