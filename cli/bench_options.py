"""Flags shared by several benchmarks. Names follow `vllm bench`."""

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
