"""Prompts handed to another kernel, under Triton's interpreter: the copy out of the pages, and what
is left with ours. The reference stands in for a kernel of torch's; tests/gpu has the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.paged_attention import make_case
from llmc.kernels.prompt_table import Measured
from llmc.kernels.prompts import Prompts
from llmc.kernels.registry import OPS
from llmc.kernels.triton import paged_attention as triton_attention
from llmc.kernels.triton import prompt_attention, torch_attention
from llmc.kernels.triton.torch_attention import Packed

CPU = torch.device("cpu")
ATTENTION = OPS["paged_attention"]
OVERLOAD = next(impl for impl in ATTENTION.impls if impl.name == "triton").op


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "multiprocessors", lambda device: 3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Prompts]:
    """The prompts that the other kernel was given: it is fastest from 8 tokens on."""
    seen: list[Prompts] = []

    def stand_in(packed: Packed) -> Tensor:
        seen.append(packed.prompts)
        for starts, lengths in zip(
            (packed.query_start, packed.key_start),
            zip(*packed.prompts.lengths, strict=True),
            strict=True,
        ):
            assert starts.dtype == torch.int32
            assert starts.diff().tolist() == list(lengths) and starts[0] == 0
        return torch_attention.expected(packed)

    ms = {"triton": 2.0, "flash": 1.0}
    lines = tuple(
        Measured(chip="", head_dim=dim, tokens=8, is_fresh=fresh, ms=ms)
        for dim in (32, 48)
        for fresh in (True, False)
    )
    monkeypatch.setattr(prompt_attention, "_lines", lambda device: lines)
    monkeypatch.setattr(torch_attention, "KERNELS", {"flash": stand_in})
    torch_attention.works.cache_clear()
    monkeypatch.setattr(torch_attention, "works", lambda *args: True)
    return seen


def attend(case: tuple[Any, ...], prompts: Prompts) -> Tensor:
    out: Tensor = OVERLOAD()(*case, prompts.words())
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [
        ([(12, 12)], 32),
        ([(12, 12), (40, 40)], 48),
        ([(9, 90), (20, 20), (11, 40)], 32),
        ([(1, 50), (1, 7), (0, 0), (33, 33)], 32),
        ([(1, 50), (3, 9), (16, 80), (70, 71)], 48),
    ],
    ids=str,
)
def test_a_step_is_divided_and_joined(
    lengths: list[tuple[int, int]], dim: int, dtype: torch.dtype, asked: list[Prompts]
) -> None:
    case = make_case(lengths, 6, 2, dim, dim, 16, CPU, dtype)
    prompts = Prompts.find(lengths, least=8)
    got = attend(case, prompts)
    assert asked == [prompts]
    assert prompts.lengths == tuple(pair for pair in lengths if pair[0] >= 8)
    want = ATTENTION.reference(*case)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_padding_after_the_prompts_gets_zeros(asked: list[Prompts]) -> None:
    lengths = [(1, 20), (24, 24)]
    query, key, value, start, context, table, *rest = make_case(
        lengths, 4, 2, 32, 32, 16, CPU, torch.bfloat16
    )
    padded = (
        torch.cat((query, torch.full((2, 4, 32), float("nan"), dtype=torch.bfloat16))),
        key,
        value,
        torch.cat((start, start[-1:] + torch.tensor([1, 2], dtype=torch.int32))),
        torch.cat((context, torch.zeros(2, dtype=torch.int32))),
        torch.cat((table, table.new_zeros(2, table.shape[1]))),
        *rest,
    )
    got = attend(padded, Prompts.find(lengths, least=8))
    assert len(asked) == 1
    assert got[25:].eq(0).all() and got[:25].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"window": 7}, {"chunk": 16}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True}],
    ids=str,
)
def test_what_other_kernels_do_not_take_stays_with_ours(
    options: dict[str, Any], asked: list[Prompts]
) -> None:
    case = make_case([(20, 20)], 4, 2, 32, 32, 16, CPU, torch.bfloat16, **options)
    got = attend(case, Prompts(lengths=((20, 20),)))
    assert asked == []
    torch.testing.assert_close(got, ATTENTION.reference(*case), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("lengths", "dim"),
    [([(7, 7)], 32), ([(1, 60)], 32), ([(20, 20)], 64)],
    ids=["short", "decode", "not measured"],
)
def test_what_was_not_measured_as_faster_stays_with_ours(
    lengths: list[tuple[int, int]], dim: int, asked: list[Prompts]
) -> None:
    case = make_case(lengths, 4, 2, dim, dim, 16, CPU, torch.bfloat16)
    got = attend(case, Prompts.find(lengths, least=2))
    assert asked == []
    torch.testing.assert_close(got, ATTENTION.reference(*case), rtol=2e-2, atol=2e-2)
