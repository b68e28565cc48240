"""Which kernel attends fastest to prompts on this GPU: `python -m bench.prompts`.

Writes the table that serving reads (kernels/prompt_table.json): for each head size, length and
whether anything was cached before, the time of our kernel and of torch's, the copy out of the
pages included. Lines of other chips stay. `--take gpu.json` takes what `bench.gpu` measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.clock import time_call
from bench.kernel_work import attention_case
from llmc.kernels.chip import chip_of
from llmc.kernels.prompt_table import CONTEXT, OWN, TABLE, Measured
from llmc.kernels.prompts import Prompts
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import write_json

HEADS, KV_HEADS = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    head_dim: int
    tokens: int
    is_fresh: bool

    @property
    def name(self) -> str:
        return f"{self.head_dim} x {self.tokens}, {'fresh' if self.is_fresh else 'cached'}"


def shapes() -> Iterator[Shape]:
    """The commonest head size first: a lease may end."""
    for head_dim in (128, 64, 96, 256):
        for is_fresh in (True, False):
            for tokens in (256, 1024, 2048, 8192):
                yield Shape(head_dim=head_dim, tokens=tokens, is_fresh=is_fresh)


def measure(shape: Shape, device: torch.device, *, budget_s: float = 0.1) -> Measured:
    """RuntimeError where not even our own kernel runs; another that fails has no time."""
    from llmc.kernels.triton import paged_attention, prompt_attention, torch_attention

    context = shape.tokens * (1 if shape.is_fresh else CONTEXT)
    case = attention_case(
        [(shape.tokens, context)], HEADS, KV_HEADS, shape.head_dim, torch.bfloat16, device
    )
    query, key, value, start, length, table, scale, *flags = case
    prompts = Prompts(lengths=((shape.tokens, context),))

    step = prompt_attention.Paged(
        query=query, key_cache=key, value_cache=value, query_start=start, context_len=length,
        block_table=table, scale=scale,
    )  # fmt: skip

    def own(s: prompt_attention.Paged) -> Tensor:
        return paged_attention.plan(
            s.query, s.key_cache, s.value_cache, s.query_start, s.context_len, s.block_table,
            s.scale, *flags,
        ).run()  # fmt: skip

    def run(name: str) -> Callable[[], Tensor]:
        return partial(prompt_attention.attend, name, own, step, prompts)

    ms = {OWN: time_call(run(OWN), device, budget_s=budget_s).seconds * 1e3}
    for name in torch_attention.KERNELS:
        takes = shape.is_fresh or name != "cudnn"
        group = HEADS // KV_HEADS
        if takes and torch_attention.works(name, shape.head_dim, group, query.dtype, device):
            ms[name] = time_call(run(name), device, budget_s=budget_s).seconds * 1e3
    return Measured(
        chip=chip_of(device),
        head_dim=shape.head_dim,
        tokens=shape.tokens,
        is_fresh=shape.is_fresh,
        ms=ms,
    )


def merged(table: Mapping[str, Any], lines: Sequence[Measured], run: Mapping[str, Any]) -> Any:
    """The table with this run's lines instead of earlier ones of its chip."""
    chip = run["chip"]
    return {
        "measured": [*(r for r in table["measured"] if r["chip"] != chip), run],
        "lines": [
            *(line for line in table["lines"] if line["chip"] != chip),
            *(asdict(line) for line in lines if len(line.ms) > 1),
        ],
    }


def describe_run(device: torch.device) -> dict[str, Any]:
    return {
        "chip": chip_of(device),
        "machine": describe_machine(),
        "date": date.today().isoformat(),
        "versions": package_versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=TABLE, help="the table to write")
    parser.add_argument("--take", type=Path, help="a result of bench.gpu, measured before")
    args = parser.parse_args()
    if args.take:
        data = json.loads(args.take.read_text(encoding="utf-8"))["parts"]["prompts"]["data"]
        run = data["run"]
        lines = [Measured(**line) for line in data["lines"].values() if "ms" in line]
    else:
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU, and the table is of GPUs")
        device = torch.device("cuda", torch.cuda.current_device())
        run, lines = describe_run(device), []
        for shape in shapes():
            lines.append(measure(shape, device))
            times = ", ".join(f"{name} {ms:.4f}" for name, ms in lines[-1].ms.items())
            print(f"{shape.name:24} {times}  -> {lines[-1].fastest}", flush=True)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    write_json(args.output, merged(table, lines, run))


if __name__ == "__main__":
    main()
