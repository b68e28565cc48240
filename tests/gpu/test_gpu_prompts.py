"""Prompts handed to torch's own kernels on a GPU, against the reference; and a model served so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import DEVICE, REHEARSED, needs_gpu

from llmc.kernels.paged_attention import make_case
from llmc.kernels.prompt_table import OWN, Measured
from llmc.kernels.prompts import Prompts
from llmc.kernels.registry import OPS

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")
from llmc.kernels.triton import prompt_attention, torch_attention

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(REHEARSED, reason="torch's flash and cuDNN attention run on a GPU only"),
]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_torch_has_the_kernel_and_it_is_right(name: str, dim: int) -> None:
    assert torch_attention.works(name, dim, 4, torch.bfloat16, DEVICE)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("flash", [(1, 700), (1, 20), (300, 300), (130, 900)]),
        ("flash", [(500, 500)]),
        ("cudnn", [(1, 700), (300, 300), (129, 129)]),
        ("cudnn", [(500, 500)]),
    ],
    ids=str,
)
def test_a_step_with_prompts_equals_the_reference(
    name: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ms = {OWN: 2.0, name: 1.0}
    lines = tuple(
        Measured(chip="", head_dim=128, tokens=128, is_fresh=fresh, ms=ms)
        for fresh in (True, False)
    )
    monkeypatch.setattr(prompt_attention, "_lines", lambda device: lines)
    called = []
    kernel = torch_attention.KERNELS[name]

    def counted(*args: Any) -> Any:
        called.append(args)
        return kernel(*args)

    torch_attention.works(name, 128, 4, torch.bfloat16, DEVICE)
    monkeypatch.setattr(torch_attention, "KERNELS", {name: counted})
    case = make_case(lengths, 8, 2, 128, 128, 16, DEVICE, torch.bfloat16)
    op = OPS["paged_attention"]
    got = next(i for i in op.impls if i.name == "triton").op()(*case, Prompts.find(lengths).words())
    assert len(called) == 1
    torch.testing.assert_close(got, op.reference(*case), rtol=2e-2, atol=2e-2)
