"""One class of the matrix: a tiny checkpoint, served and compared in a separate process.

`bench.coverage` forks that process from one that has imported this module, to save import time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import tiny_configs
import tiny_engine
from tiny_models import continue_greedily, load_reference, prompts

MEMORY_BYTES = 2 * 2**30
LENGTHS = (1, 5, 19, 33, 12)
NUM_TOKENS = 10
# Engine limits that determine how the same requests are divided into steps.
SCENARIOS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 14, "max_num_batched_tokens": 9},
}


def run(model_type: str) -> dict[str, Any]:
    """The row of the matrix. `stage` is the last one reached, `reason` why it ended."""
    row: dict[str, Any] = {"type": model_type, "stage": "config", "parity": False, "reason": ""}
    try:
        config = tiny_configs.tiny_config(model_type)
        row["class"] = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_configs.save_random(config, Path(folder))
            row["class"] = json.loads((path / "config.json").read_text())["architectures"][0]
            model = load_reference(path)
            expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
            row["stage"] = "transformers"  # runs it
            del model
            _serve(path, expected, row)
    except Exception as error:  # whatever a model's code raises is this row's result
        text = re.sub(r"/\S*?/(site-packages/|(?=llmc/))", "", " ".join(str(error).split()))
        row["reason"] = f"{type(error).__name__}: {text[:400]}"
    return row


def _serve(path: Path, expected: list[Any], row: dict[str, Any]) -> None:
    start = time.perf_counter()
    running = tiny_engine.start(path)
    row["stage"] = "served"
    row["seconds"] = round(time.perf_counter() - start, 1)
    program = running.started.info.pass_reports
    row["passes"] = [r.split(":")[0] for r in program if ": -[" in r]
    answers = {}
    for name, limits in SCENARIOS.items():
        engine = running.engine(**limits)
        answers[name] = tiny_engine.generate(engine, [r.prompt for r in expected], NUM_TOKENS)
        if name == "preempted":
            row["preemptions"] = engine.stats().num_preemptions
    row["ties"], wrong = _differences(expected, answers)
    row["parity"] = not wrong
    row["reason"] = "; ".join(wrong[:3])
    if wrong:  # a few classes forget something in their own cache
        model = load_reference(path)
        uncached = [
            continue_greedily(model, r.prompt, NUM_TOKENS, use_cache=False) for r in expected
        ]
        ties, still_wrong = _differences(uncached, answers)
        if not still_wrong:
            row["ties"], row["parity"] = ties, True
            row["reason"] = f"as transformers without its cache; with it: {wrong[0]}"


def _differences(expected: list[Any], answers: dict[str, Any]) -> tuple[int, list[str]]:
    """The number of positions skipped after ties, and the differences by scenario."""
    skipped, wrong = 0, []
    for name, got in answers.items():
        ties, found = tiny_engine.differences(expected, got)
        skipped += ties
        wrong += [f"{name}: {f}" for f in found]
    return skipped, wrong


def send_row(model_type: str, answer: Connection) -> None:
    """The process's main function."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what models and libraries print
    os.dup2(nowhere, 2)
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    answer.send_bytes(json.dumps(run(model_type)).encode())
