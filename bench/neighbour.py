"""Measures decode, a batch and a prefill, alone and next to a process that keeps one core busy.

    python -m bench.neighbour [--config bench/configs/qwen3-0.6b.json] [--dtype bfloat16]
                              [--rounds 5] [--output-json FILE]

Rounds alternate between the two, so that both see the same machine. The output is medians in tokens
per second, and the share of the speed kept next to the other process. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from llmc import LLM, SamplingParams
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json

PROMPT = 16  # tokens, for loads that measure decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    requests: int
    prompt: int
    output: int  # tokens; 1: the load measures prefill

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt if self.output == 1 else self.output)


LOADS = (
    Load(name="decode", requests=1, prompt=PROMPT, output=32),
    Load(name="batch of 4", requests=4, prompt=PROMPT, output=16),
    Load(name="prefill of 256", requests=1, prompt=256, output=1),
)


@contextmanager
def busy_neighbour() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        time.sleep(0.5)  # until it has started
        try:
            yield
            assert process.poll() is None, "the other process was not running"
        finally:
            process.kill()


def rate(llm: LLM, load: Load, gen: random.Random) -> float:
    """Tokens per second."""
    prompts = [[gen.randrange(1000) for _ in range(load.prompt)] for _ in range(load.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return load.tokens / (time.perf_counter() - start)


def measure(llm: LLM, rounds: int) -> list[dict[str, float | str]]:
    gen = random.Random(0)
    for load in LOADS:  # not counted
        rate(llm, load, gen)
    alone: dict[Load, list[float]] = {load: [] for load in LOADS}
    beside: dict[Load, list[float]] = {load: [] for load in LOADS}
    for _ in range(rounds):
        for load in LOADS:
            alone[load].append(rate(llm, load, gen))
        with busy_neighbour():
            for load in LOADS:
                beside[load].append(rate(llm, load, gen))
    return [
        {
            **asdict(load),
            "alone": statistics.median(alone[load]),
            "beside": statistics.median(beside[load]),
        }
        for load in LOADS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("bench/configs/qwen3-0.6b.json"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(args.config, Path(directory) / "config.json")
        llm = LLM(
            directory, load_format="dummy", dtype=args.dtype, device="cpu", max_model_len=1024
        )
    results = measure(llm, args.rounds)
    print(f"{torch.get_num_threads()} threads, tokens per second")
    for result in results:
        kept = float(result["beside"]) / float(result["alone"])
        print("{name:16} alone {alone:8.1f}  beside {beside:8.1f}".format(**result), f"{kept:6.0%}")
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "results": results})


if __name__ == "__main__":
    main()
