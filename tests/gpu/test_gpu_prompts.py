"""Prompts handed to torch's FlashAttention on a GPU, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import DEVICE, DRY_RUN, needs_gpu

from llmc.kernels.paged_attention import make_case
from llmc.kernels.prompts import MIN_TOKENS, Prompts
from llmc.kernels.registry import OPS

pytest.importorskip("triton", reason="triton is not installed: its ops cannot be tested")
from llmc.kernels.triton import prompt_attention

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(DRY_RUN, reason="torch's FlashAttention runs on a GPU only"),
]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 700), (1, 20), (300, 300), (130, 130)], [(500, 500)], [(130, 900), (129, 129)]],
    ids=str,
)
def test_a_step_with_prompts_equals_the_reference(
    lengths: list[tuple[int, int]], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompt_attention.has_flash(DEVICE)
    calls = []
    flash = prompt_attention.flash

    def counted(*args: Any) -> Any:
        calls.append(args)
        return flash(*args)

    monkeypatch.setattr(prompt_attention, "flash", counted)
    case = make_case(lengths, 8, 2, dim, dim, 16, DEVICE, torch.bfloat16)
    op = OPS["paged_attention"]
    hint = Prompts.find(lengths, MIN_TOKENS).words()
    got = next(i for i in op.impls if i.name == "triton").op()(*case, hint)
    assert len(calls) == 1
    torch.testing.assert_close(got, op.reference(*case), rtol=2e-2, atol=2e-2)
