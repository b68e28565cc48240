"""`chain_linears` in Triton under its interpreter: bit for bit what single launches compute.

The interpreter runs programs one after another, so no program can wait for another. With one
program it runs the whole kernel but the wait itself; with several, a launch for each linear, with
the tiles divided as on a GPU. tests/kernels/test_triton_aot.py checks the order of the barrier's
instructions.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import fast_interpreter  # noqa: F401 - the tests take a third of the time
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import copy_case
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.triton import chain_linears, fused_linear
from llmc.kernels.triton.counters import counters
from llmc.kernels.triton.launch import Launch

CPU = torch.device("cpu")
Case = tuple[Any, ...]
few = settings(max_examples=10, deadline=None, derandomize=True)


def make_case(
    rows: int, width: int, depth: int, inner: int, channels: int, *, act: str = "silu",
    dtype: torch.dtype = torch.float32, biased: bool = False, weighted: bool = True,
) -> Case:  # fmt: skip
    gen = torch.Generator().manual_seed(rows + width)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    def linear(n: int, k: int) -> tuple[Tensor, Tensor | None]:
        return rand(n, k) * k**-0.5, rand(n) if biased else None

    norms = [rand(width) if weighted else None for _ in range(2)]
    return (
        rand(1, rows, width), rand(1, rows, depth), *linear(width, depth),
        *linear(2 * inner, width), norms[0], 1e-5, 0.5, act, *linear(width, inner),
        *linear(channels, width), norms[1], 1e-6, 0.0,
    )  # fmt: skip


def by_single_ops(case: Case) -> tuple[Tensor, Tensor]:
    """(result, hidden state) of the four ordinary ops."""
    hidden, x, w, b, up, up_b, g, eps, offset, act, down, down_b, n, n_b, g2, eps2, offset2 = case
    fused_linear.run_add(hidden, x, w, b, None, None, 0.0, None)
    inner = fused_linear.run(hidden, up, up_b, g, eps, offset, act, None)
    fused_linear.run_add(hidden, inner, down, down_b, None, None, 0.0, None)
    return fused_linear.run(hidden, n, n_b, g2, eps2, offset2, None, None), hidden


def assert_equals_single_ops(case: Case, programs: int) -> None:
    want, want_hidden = by_single_ops(copy_case(case))
    mine = copy_case(case)
    plan = chain_linears.plan(*mine, programs=programs)
    assert len(plan.launches) == (1 if programs == 1 else 4)
    assert {launch.grid for launch in plan.launches} == {(programs,)}
    scratch = plan.launches[0].args
    for made in (plan.out, scratch["inner"], scratch["partial"], scratch["squares"]):
        made.fill_(float("nan"))
    assert torch.equal(plan.run(), want) and torch.equal(mine[0], want_hidden)
    assert not counters(CPU, 1).any()
    mine[0].copy_(case[0])  # as a graph is replayed
    assert torch.equal(plan.run(), want) and torch.equal(mine[0], want_hidden)


@few
@given(
    rows=st.integers(1, 8),
    sizes=st.tuples(*[st.integers(1, 90)] * 4),
    act=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
    biased=st.booleans(),
    weighted=st.booleans(),
    programs=st.integers(1, 7),
)
def test_equals_single_launches(
    rows: int, sizes: tuple[int, ...], act: str, biased: bool, weighted: bool, programs: int
) -> None:
    case = make_case(rows, *sizes, act=act, biased=biased, weighted=weighted)
    assert_equals_single_ops(case, programs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_equals_single_launches_of_deep_linears(
    rows: int, programs: int, dtype: torch.dtype
) -> None:
    """Each linear is divided along its depth, with and without masks."""
    for sizes in ((32, 2048, 1100, 40), (1024, 16, 16, 24)):
        case = make_case(rows, *sizes, dtype=dtype, biased=True)
        (launch,) = chain_linears.plan(*case, programs=1).launches
        divided = [name for name in launch.constants if name.endswith("DIVISION")]
        parts = [launch.constants[name][0] for name in divided]
        assert len(divided) == 4 and max(parts) > 1
        assert_equals_single_ops(case, programs)


class RecordingKernel:
    """Stands in for a kernel: keeps what it is launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> RecordingKernel:
        return self

    def __call__(self, **given: Any) -> None:
        self.given = given


def test_one_cooperative_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_linears, "interpreted", lambda: False)
    for rows in (1, 8):
        (launch,) = chain_linears.plan(*make_case(rows, 64, 64, 64, 64)).launches
        per_multiprocessor, rest = divmod(launch.grid[0], chain_linears.multiprocessors(CPU))
        assert launch.cooperative and not launch.pdl and rest == 0
        assert launch.max_registers is not None
        assert per_multiprocessor * 32 * launch.num_warps * launch.max_registers <= 65536
        kernel = RecordingKernel()
        replace(launch, kernel=kernel).run()
        options = kernel.given.keys() - launch.args.keys() - launch.constants.keys()
        assert options == {"num_warps", "num_stages", "launch_cooperative_grid", "maxnreg"}
        assert options <= {field.name for field in fields(CUDAOptions)}
        assert kernel.given["maxnreg"] == launch.max_registers
        assert kernel.given["launch_cooperative_grid"] is True


ORDINARY: dict[str, dict[str, Any]] = {
    "many rows": {"rows": 9},
    "float16, whose squares overflow": {"dtype": torch.float16},
    "a GPU without it": {},
    "a strided hidden state": {},
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_the_ordinary_kernels_run_elsewhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = list(make_case(**{"rows": 2, **ORDINARY[kind]}, width=48, depth=32, inner=40,
                          channels=24))  # fmt: skip
    if kind == "a GPU without it":
        monkeypatch.setattr(chain_linears, "supported", lambda: False)
    elif kind == "a strided hidden state":
        case[0] = torch.cat((case[0], case[0]), -1)[..., :48]
    launched = []
    run = Launch.run

    def recorded(launch: Launch) -> None:
        launched.append(launch.kernel.__name__)
        run(launch)

    want, want_hidden = by_single_ops(copy_case(tuple(case)))
    monkeypatch.setattr(Launch, "run", recorded)
    got = torch.ops.llmc_triton.chain_linears(*case)
    assert "chain_kernel" not in launched
    assert torch.equal(got, want) and torch.equal(case[0], want_hidden)


def test_a_barrier_counts_every_program_once() -> None:
    """The last program to leave finds exactly the arrivals of three barriers and of the exit."""
    (launch,) = chain_linears.plan(*make_case(1, 16, 16, 16, 16), programs=1).launches
    counter = launch.args["counter"]
    counter[0] = 1  # one arrival too many: nobody is the last
    try:
        launch.run()
        assert counter[0] == 1 + 4
    finally:
        counter[0] = 0
    launch.run()
    assert counter[0] == 0
