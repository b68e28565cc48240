"""Which kernel attends fastest to prompts, as measured: prompt_table.json, by chip and head size.

`python -m bench.prompts` measures and writes it; nothing is tuned at start. A chip that
nobody has measured has no lines, and every prompt there goes to this project's own kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from llmc.kernels.chip import chip_of
from llmc.kernels.prompts import Prompts

TABLE = Path(__file__).with_name("prompt_table.json")
OWN = "triton"  # the name of our kernel among the measured ones
CONTEXT = 4  # tokens of context for each new one, where a prompt has a cached beginning
_GAIN = 0.95  # another kernel must take less than this share of our time


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of the kernels for one prompt: `tokens` new ones of heads of `head_dim`, 16 bits each.

    `is_fresh`: nothing was cached before; else the context is CONTEXT times as long.
    """

    chip: str
    head_dim: int
    tokens: int
    is_fresh: bool
    ms: Mapping[str, float]

    @property
    def fastest(self) -> str:
        best = min(self.ms, key=lambda name: self.ms[name])
        return best if self.ms[best] < _GAIN * self.ms.get(OWN, 0.0) else OWN


@cache
def load_table() -> tuple[Measured, ...]:
    """All lines."""
    lines = json.loads(TABLE.read_text(encoding="utf-8"))["lines"]
    return tuple(Measured(**line) for line in lines)


def measured_on(device: torch.device) -> tuple[Measured, ...]:
    """The lines of this GPU's kind."""
    chip = chip_of(device)
    return tuple(line for line in load_table() if line.chip == chip)


def head_dims(lines: Sequence[Measured]) -> tuple[int, ...]:
    """The head sizes for which another kernel than ours serves some prompt."""
    return tuple(sorted({line.head_dim for line in lines if line.fastest != OWN}))


def choose(lines: Sequence[Measured], head_dim: int, prompts: Prompts) -> str:
    """The kernel for a step's prompts: that of the longest line that they reach on average.

    A longer context than was measured stays with ours: it would be copied for few tokens.
    """
    if not prompts.lengths or prompts.num_keys > CONTEXT * prompts.num_tokens:
        return OWN
    tokens = prompts.num_tokens // len(prompts.lengths)
    like = [
        line
        for line in lines
        if line.head_dim == head_dim
        and line.is_fresh == prompts.are_fresh
        and line.tokens <= tokens
    ]
    return max(like, key=lambda line: line.tokens).fastest if like else OWN
