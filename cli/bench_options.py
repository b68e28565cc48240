"""Flags that several benchmarks share, written once. Names follow `vllm bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmc.cli.options import option

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
        help="Mean tokens of random prompts. "
        "When absent: paragraphs of Python's documentation, as long as they are.",
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
        help="Mean output tokens; overrides the lengths of a dataset. "
        "128 for random prompts when absent.",
        panel=WORKLOAD,
    ),
]
RangeRatio = Annotated[
    float,
    option(
        "--random-range-ratio",
        metavar="SHARE",
        help="Lengths are uniform over mean * (1 - r) to mean * (1 + r).",
        panel=WORKLOAD,
    ),
]
PrefixLen = Annotated[
    int,
    option(
        "--random-prefix-len",
        metavar="TOKENS",
        help="Tokens that all prompts begin with, on top of their length.",
        panel=WORKLOAD,
    ),
]
DatasetPath = Annotated[
    Path | None,
    option(
        "--dataset-path",
        "--dataset",
        help="Requests from this file instead: JSONL with `prompt` and `output_len`, "
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
        help="Write the result with versions, machine and command to this file.",
        panel=RESULT,
    ),
]
Plot = Annotated[
    Path | None,
    option("--plot", help="Draw the latency distributions into this PNG file.", panel=RESULT),
]
Percentiles = Annotated[
    str,
    option("--metric-percentiles", help="Percentiles to report.", panel=RESULT),
]
Bandwidth = Annotated[
    bool,
    option(
        "--bandwidth/--no-bandwidth",
        help="Measure the machine's read bandwidth and the share that decoding reached.",
        panel=RESULT,
    ),
]
