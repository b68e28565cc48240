"""Flags shared by several benchmarks, named as in `vllm bench`, and what they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmc.cli.options import option
from llmc.errors import ConfigError

WORKLOAD = "Workload"
RESULT = "Result"

NumPrompts = Annotated[
    int, option("--num-prompts", help="Requests to send.", metavar="REQUESTS", panel=WORKLOAD)
]
InputLen = Annotated[
    int | None,
    option(
        "--random-input-len",
        "--input-len",
        help="Mean length of random prompts. "
        "Default: paragraphs of Python's documentation, at their own lengths.",
        metavar="TOKENS",
        panel=WORKLOAD,
    ),
]
OutputLen = Annotated[
    int | None,
    option(
        "--random-output-len",
        "--output-len",
        metavar="TOKENS",
        help="Mean output length; overrides the lengths of a dataset. "
        "Default for random prompts: 128.",
        panel=WORKLOAD,
    ),
]
RangeRatio = Annotated[
    float,
    option(
        "--random-range-ratio",
        metavar="SHARE",
        help="Lengths are uniform from mean * (1 - r) to mean * (1 + r).",
        panel=WORKLOAD,
    ),
]
PrefixLen = Annotated[
    int,
    option(
        "--random-prefix-len",
        metavar="TOKENS",
        help="Length of a common prefix, added to the length of every prompt.",
        panel=WORKLOAD,
    ),
]
DatasetPath = Annotated[
    Path | None,
    option(
        "--dataset-path",
        "--dataset",
        help="Read requests from this file: JSONL with `prompt` and `output_len`, "
        "or ShareGPT JSON.",
        panel=WORKLOAD,
    ),
]
Temperature = Annotated[
    float | None, option("--temperature", help="0 is greedy.", metavar="NUMBER", panel=WORKLOAD)
]
OutputJson = Annotated[
    Path | None,
    option(
        "--output-json",
        help="Write the result, with versions, machine and command, to this file.",
        panel=RESULT,
    ),
]
Plot = Annotated[
    Path | None,
    option("--plot", help="Plot the latency distributions to this PNG file.", panel=RESULT),
]
Percentiles = Annotated[
    str,
    option("--metric-percentiles", help="Percentiles to report.", panel=RESULT),
]
Bandwidth = Annotated[
    bool,
    option(
        "--bandwidth/--no-bandwidth",
        help="Measure the machine's read bandwidth and the share of it that decoding reached.",
        panel=RESULT,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests to send, as described by the user."""

    num_prompts: int
    input_len: int | None
    output_len: int | None
    range_ratio: float
    prefix_len: int
    dataset: Path | None
    seed: int

    def __post_init__(self) -> None:
        least = {
            "number of prompts": (self.num_prompts, 1),
            "length of random prompts": (self.random_input_len, 1),
            "output length": (self.random_output_len, 1),
            "length of the common prefix": (self.prefix_len, 0),
        }
        for name, (value, lowest) in least.items():
            if value < lowest:
                raise ConfigError(f"the {name} must be at least {lowest}, got {value}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"the range ratio must be in [0, 1), got {self.range_ratio}")

    @property
    def is_text(self) -> bool:
        """Whether to use real text, because no flag describes the prompts."""
        return self.dataset is None and self.input_len is None and self.prefix_len == 0

    @property
    def random_input_len(self) -> int:
        return 128 if self.input_len is None else self.input_len

    @property
    def random_output_len(self) -> int:
        return 128 if self.output_len is None else self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where and how to report the result."""

    json: Path | None
    plot: Path | None
    percentiles: str
    bandwidth: bool = False
