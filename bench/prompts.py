"""Compares our attention with torch's FlashAttention on new prompts: `python -m bench.prompts`.

Needs a GPU. The second time includes the copy out of the pages. With `--output-json tuned.json`,
the lengths from which FlashAttention is faster are written to that table, which LLMC_TUNED makes
llmc use (kernels/tuned.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.clock import time_call
from bench.kernel_work import attention_case
from bench.tuned_table import make_line, write_lines
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import MIN_TOKENS, PromptConfig, Prompts, prompt_config
from llmc.kernels.tuned import Key

HEADS, KV_HEADS = 32, 8
LENGTHS = (MIN_TOKENS, 256, 1024, 2048, 8192)
NEVER = 2**30  # tokens


def shapes() -> Iterator[tuple[int, int]]:
    """(head size, tokens), the most common head size first, in case the run is interrupted."""
    for head_dim in (128, 64, 96, 256):
        for tokens in LENGTHS:
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


def lines(
    measured: Mapping[tuple[int, int], Mapping[str, float]],
) -> dict[Key, dict[str, Any] | None]:
    """The lines of the table for milliseconds by shape; None where the code's rule is right. Head
    sizes of which a length is missing are left out."""
    found: dict[Key, dict[str, Any] | None] = {}
    for dim in dict.fromkeys(dim for dim, _ in measured):
        ms = {tokens: measured.get((dim, tokens), {}) for tokens in LENGTHS}
        if not all({"flash", "triton"} <= set(times) for times in ms.values()):
            continue
        least = NEVER
        for tokens in reversed(LENGTHS):  # down to the first at which ours is faster
            if ms[tokens]["flash"] >= ms[tokens]["triton"]:
                break
            least = tokens
        options = PromptConfig(min_tokens=least)
        key = prompt_config.key((dim,), chosen := prompt_config.rule(dim))
        found[key] = None if options == chosen else make_line(key, options, {"ms": ms})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-json", type=Path, help="the table to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch detects no GPU, which both kernels need")
    device = torch.device("cuda", torch.cuda.current_device())
    measured = {}
    for head_dim, tokens in shapes():
        ms = measured[head_dim, tokens] = measure(head_dim, tokens, device)
        print(f"{head_dim:4} x {tokens:5}  " + "  ".join(f"{n} {t:.4f} ms" for n, t in ms.items()))
    if args.output_json:
        write_lines(args.output_json, lines(measured))


if __name__ == "__main__":
    main()
