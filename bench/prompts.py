"""Compares our attention with torch's FlashAttention on new prompts: `python -m bench.prompts`.

Needs a GPU. The second time includes the copy out of the pages. The results determine the rule in
kernels/prompts.py for which prompts use FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.clock import time_call
from bench.kernel_work import attention_case
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import Prompts

HEADS, KV_HEADS = 32, 8


def shapes() -> Iterator[tuple[int, int]]:
    """(head size, tokens), the most common head size first, in case the run is interrupted."""
    for head_dim in (128, 64, 96, 256):
        for tokens in (256, 1024, 2048, 8192):
            yield head_dim, tokens


def measure(
    head_dim: int, tokens: int, device: torch.device, *, budget_s: float = 0.1
) -> dict[str, float]:
    """Milliseconds of one prompt, in bfloat16, by each kernel."""
    from llmc.kernels.triton import paged_attention as ours
    from llmc.kernels.triton import prompt_attention

    case = attention_case([(tokens, tokens)], HEADS, KV_HEADS, head_dim, torch.bfloat16, device)
    step = paged_attention.bind(case)
    del step["prompts"]
    prompts = Prompts(lengths=(tokens,))

    def own(**arguments: Any) -> Tensor:
        return ours.plan(**arguments).run()

    runs = {
        "triton": partial(own, **step),
        "flash": partial(prompt_attention.attend, own, step, prompts),
    }
    return {n: time_call(run, device, budget_s=budget_s).seconds * 1e3 for n, run in runs.items()}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch detects no GPU, which both kernels need")
    device = torch.device("cuda", torch.cuda.current_device())
    for head_dim, tokens in shapes():
        ms = measure(head_dim, tokens, device)
        print(f"{head_dim:4} x {tokens:5}  " + "  ".join(f"{n} {t:.4f} ms" for n, t in ms.items()))


if __name__ == "__main__":
    main()
