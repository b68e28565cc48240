"""Measures launch options on this GPU: `python -m bench.tune --output-json tuned.json`.

Every call of a model's program (bench/program_work.py) is made once, to learn which options it asks
for. Calls that ask for the same options are tuned together (bench/option_search.py). Options that
can't be compiled or that give other results than the reference are left out, and those that save
more than 3 % are written to the table, which LLMC_TUNED=tuned.json makes llmc use
(kernels/tuned.py).

With `--steps 1,8,64`, the decode steps of so many requests are timed instead, as CUDA graphs of a
running engine (bench/step_options.py). In a step, a kernel starts while the previous one ends, so
other options can be the fastest than for isolated calls.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.clock import time_call
from bench.gpu import settings
from bench.gpu.settings import CONFIGS
from bench.gpu.subject import model_folder, running
from bench.kernel_work import InTurn, Maker, Work, made
from bench.option_search import GAIN, Found, check, compiling_together, only_kernels, search_all
from bench.program_work import Sizes, program_work
from bench.step_options import Step, tune_steps
from bench.tuned_table import Asked, using, write_lines
from llmc.config import EngineConfig
from llmc.kernels.quantized_linear import FORMATS, Format
from llmc.kernels.registry import OPS
from llmc.kernels.tuned import Key

TINY = Sizes(tokens=(1, 2, 9, 40, 150), contexts=((20, 7),), prompt=70)


def model_configs(models: Iterable[str], formats: Sequence[Format]) -> Iterator[EngineConfig]:
    """Each model on a GPU in bfloat16: with weights as stored, and in `formats`. Models are files
    of bench/configs, or else what EngineConfig takes."""
    for model in models:
        is_config = (CONFIGS / model).is_file()
        with model_folder(model) if is_config else contextlib.nullcontext(model) as source:
            config = EngineConfig(model=str(source), device="cuda", dtype="bfloat16")
            yield config
            for format in formats:
                yield replace(config, quantization=format)
                if format == "fp8":
                    yield replace(config, quantization=format, activation_bits=8)


def asked_options(makers: Iterable[Maker]) -> dict[Key, list[Work]]:
    """The calls by the options that they ask for; those that ask for none or fail are left out."""
    found: dict[Key, list[Work]] = {}
    with compiling_together():
        for maker in makers:
            try:
                for work in made(maker):
                    asked = Asked()
                    with using(asked):
                        work.run()
                    for key in asked:
                        found.setdefault(key, []).append(work)
            except Exception as error:  # such as too little memory
                print(f"left out: {type(error).__name__}: {error}", flush=True)
    return found


class Calls:
    """Isolated calls that ask for the same options, checked by their ops' references."""

    gain = GAIN
    noise = 0.99

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._wanted = [_results(OPS[work.op].reference(*_first(work).args)) for work in works]

    def run(self) -> None:
        for work in self._works:
            work.run()

    def seconds(self, budget_s: float) -> dict[str, float]:
        self.check()
        return {
            f"{work.op}: {work.case}": time_call(work.run, work.device, budget_s=budget_s).seconds
            for work in self._works
        }

    def check(self) -> None:
        """Raises RuntimeError where a kernel's result is not the reference's."""
        with only_kernels():
            for work, want in zip(self._works, self._wanted, strict=True):
                check(_results(_first(work)()), want)


def _first(work: Work) -> partial[Any]:
    call = work.run.calls[0] if isinstance(work.run, InTurn) else work.run
    assert isinstance(call, partial), "`fast` makes one"
    return call


def _results(made: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Without the choices of a router, which rounding can change; their weights are compared."""
    results = [made] if isinstance(made, Tensor) else made
    return [result for result in results if result.is_floating_point()]


def tune(
    asked: Mapping[Key, Sequence[Work]], path: Path, seconds: float, *, budget_s: float = 0.05
) -> Iterator[Found]:
    """Search for the options of isolated calls. The table at `path` is up to date whenever one was
    found."""
    write_lines(path, {})
    for found in search_all(asked, Calls, seconds, budget_s=budget_s):
        write_lines(path, {found.key: found.line})
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-json", type=Path, default=Path("tuned.json"))
    parser.add_argument(
        "--model", action="append", help="one or more: a file of bench/configs, or any model"
    )
    parser.add_argument(
        "--format", action="append", default=[], choices=FORMATS, help="also with weights in it"
    )
    parser.add_argument("--only", default="", help="only functions whose names contain this")
    parser.add_argument("--seconds", type=float, default=300, help="of all searches")
    parser.add_argument(
        "--steps", type=_counts, help="tune decode steps of so many requests (1,8,64), as graphs"
    )
    parser.add_argument(
        "--context", type=_counts, default=(90,), help="tokens of each of their requests (90,2048)"
    )
    parser.add_argument("--tiny", action="store_true", help="in Triton's interpreter, on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("torch detects no GPU, whose options are to be measured")
    importlib.import_module("llmc.kernels.triton")
    models = args.model or ["llama-3.1-8b.json"]
    if args.steps and args.format:
        parser.error("--steps measures the weights as they are stored, without --format")
    if args.steps:
        _tune_steps(models, args)
        return
    sizes = TINY if args.tiny else Sizes()
    asked = asked_options(program_work(model_configs(models, args.format), device, sizes))
    asked = {key: works for key, works in asked.items() if args.only in key[0]}
    for _ in tune(asked, args.output_json, args.seconds):
        pass  # it prints and writes them


def _tune_steps(models: Sequence[str], args: argparse.Namespace) -> None:
    """All models are tuned together, because they can ask for the same options."""
    known = settings.tiny() if args.tiny else settings.full()
    small = replace(known, max_rows=max(args.steps))
    steps: list[Step] = []
    with contextlib.ExitStack() as stack:
        for name in models:
            try:
                subject = stack.enter_context(running(small, small.of_config(name)))
                for context, rows in product(args.context, args.steps):
                    steps.append(Step(subject, name, rows, context))
            except Exception as error:  # whatever it is, those before and after it are tuned
                print(f"left out: {name}: {type(error).__name__}: {error}", flush=True)
        if not steps:
            raise SystemExit("there is no step to measure")
        tune_steps(steps, args.output_json, args.seconds, only=args.only)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


if __name__ == "__main__":
    main()
