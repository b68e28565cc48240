"""Measures launch options on this GPU: `python -m bench.tune --output-json tuned.json`.

Every call of a model's program (bench/program_work.py) is made once, to learn which options it asks
for. Calls that ask for the same options are tuned together: from the code's own options, the search
goes to the fastest neighbour, with one number halved or doubled, until there is none. Neighbours
that can't be compiled or that give other results than the reference are left out. Options that save
more than 3 % are written to the table, which LLMC_TUNED=tuned.json makes llmc use
(kernels/tuned.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.clock import time_call
from bench.gpu.settings import CONFIGS
from bench.gpu.subject import model_folder
from bench.kernel_work import InTurn, Maker, Work, made
from bench.program_work import Sizes, program_work
from llmc.config import EngineConfig
from llmc.kernels import tuned
from llmc.kernels.quantized_linear import FORMATS, Format
from llmc.kernels.registry import OPS
from llmc.kernels.tuned import FUNCTIONS, VERSION, Key, Tuned, device_name, read_table
from llmc.load_test.machine import package_versions
from llmc.load_test.report import context, write_json

_GAIN = 0.97  # of the time of the code's options
_WORST = 1.03  # of any single call
_MAX_ERROR = 0.02  # relative to the largest value of the reference
_STEP = 0.99  # of the best so far: smaller differences are noise
_ROUNDS = 4
TINY = Sizes(tokens=(1, 2, 9, 40, 150), contexts=((20, 7),), prompt=70)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best options found for `key`, and the seconds of each call before and after."""

    key: Key
    options: Any
    before: Mapping[str, float]
    after: Mapping[str, float]
    num_tried: int
    failed: Mapping[str, str]

    @property
    def is_faster(self) -> bool:
        ratios = [self.after[case] / self.before[case] for case in self.before]
        return statistics.mean(ratios) < _GAIN and max(ratios) < _WORST

    def __str__(self) -> str:
        name, shape, chosen = self.key
        old, new = asdict(chosen), asdict(self.options)
        changed = [
            f"{field} {old[field]} -> {new[field]}" for field in old if old[field] != new[field]
        ]
        times = [
            f"{1e6 * s:.1f} -> {1e6 * self.after[case]:.1f} us" for case, s in self.before.items()
        ]
        return (
            f"{name}{shape}: {', '.join(changed) or 'as the code chooses'}"
            f"{'' if self.is_faster or not changed else ' (not kept)'}; {', '.join(times)}; "
            f"{self.num_tried} tried, {len(self.failed)} failed"
        )


def make_line(key: Key, options: Any, measured: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table. `measured`: what it is based on, for readers."""
    name, shape, chosen = key
    versions = package_versions()
    return {
        "function": name,
        "arguments": dict(zip(FUNCTIONS[name].shape, shape, strict=True)),
        "chosen": asdict(chosen),
        "options": asdict(options),
        "measured": measured,
        "date": context()["date"],
        "versions": {name: versions.get(name) for name in ("torch", "triton")},
    }


def write_lines(path: Path, lines: Mapping[Key, Mapping[str, Any] | None]) -> None:
    """Replace or, for None, remove lines of the table at `path`; a new one if there is none that
    fits the code."""
    kept: dict[Key, Mapping[str, Any] | None] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        old = json.loads(path.read_text(encoding="utf-8"))["lines"]
        kept = dict(zip(read_table(path), old, strict=True))
    left = [line for line in {**kept, **lines}.values() if line is not None]
    write_json(path, {"version": VERSION, "device": device_name(), "lines": left})


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


class _Asked(dict[Key, Any]):
    """An empty table that keeps the keys it was asked for."""

    def __bool__(self) -> bool:
        return True

    def get(self, key: Key, default: Any = None) -> Any:
        self[key] = default
        return default


@contextlib.contextmanager
def using(table: Mapping[Key, Any]) -> Iterator[None]:
    with mock.patch.object(tuned, "load_table", lambda: table):
        yield


def asked_options(makers: Iterable[Maker]) -> dict[Key, list[Work]]:
    """The calls by the options that they ask for; those that ask for none or fail are left out."""
    found: dict[Key, list[Work]] = {}
    with compiling_together():
        for maker in makers:
            try:
                for work in made(maker):
                    asked = _Asked()
                    with using(asked):
                        work.run()
                    for key in asked:
                        found.setdefault(key, []).append(work)
            except Exception as error:  # such as too little memory
                print(f"left out: {type(error).__name__}: {error}", flush=True)
    return found


def compiling_together() -> contextlib.AbstractContextManager[None]:
    from llmc.kernels.triton import launch  # imports triton

    return launch.compiling_together()


def neighbours(function: Tuned[*tuple[Any, ...], Any], at: Any, chosen: Any) -> Iterator[Any]:
    """`at` with one number changed, where the kernel still computes what it does with `chosen`.
    Flags stay: what they do depends on more than the arguments, such as the size of blocks."""
    for name, value in asdict(at).items():
        if type(value) is bool:
            continue
        by_one = name == "num_stages"
        for other in (value - 1, value + 1) if by_one else (value // 2, value * 2):
            new = replace(at, **{name: other})
            if new != at and function.accepts(new, chosen):
                yield new


def search(key: Key, works: Sequence[Work], deadline: float, *, budget_s: float = 0.05) -> Found:
    """Descend from the code's options to faster ones until `deadline` (of time.monotonic)."""
    chosen = best = key[2]
    wanted = [OPS[work.op].reference(*_first(work).args) for work in works]
    before = _times(works, {}, budget_s)
    best_ratio, tried, failed = 1.0, {chosen}, {}
    for _ in range(_ROUNDS):
        start = best
        new = [one for one in neighbours(FUNCTIONS[key[0]], start, chosen) if one not in tried]
        with compiling_together():
            for options in new:
                with contextlib.suppress(Exception), using({key: options}):
                    for work in works:
                        work.run()
        for options in new:
            if time.monotonic() > deadline:
                break
            tried.add(options)
            try:
                with using({key: options}):
                    for work, want in zip(works, wanted, strict=True):
                        _check(work, want)
                times = _times(works, {key: options}, budget_s)
            except Exception as error:  # whatever it is, the others are tried
                failed[str(options)] = f"{type(error).__name__}: {error}"[:200]
                continue
            ratio = statistics.mean(times[case] / before[case] for case in before)
            if ratio < _STEP * best_ratio:
                best, best_ratio = options, ratio
        if best == start:
            break
    after = before
    if best != chosen:  # both again and longer: the least of many is lucky
        before, after = (_times(works, table, 4 * budget_s) for table in ({}, {key: best}))
    return Found(
        key=key, options=best, before=before, after=after, num_tried=len(tried) - 1, failed=failed
    )


def _first(work: Work) -> partial[Any]:
    call = work.run.calls[0] if isinstance(work.run, InTurn) else work.run
    assert isinstance(call, partial), "`fast` makes one"
    return call


def _check(work: Work, want: Tensor | Sequence[Tensor]) -> None:
    """Raises RuntimeError where the kernel's result is not the reference's."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("it can't be compiled")

    # new memory is filled with NaN: it may hold the right results of the call before
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(OPS[work.op], "reference", refuse):
            got = _first(work)()
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, right in zip(_numbers(got), _numbers(want), strict=True):
        error = (mine - right).abs().max() / right.abs().max()
        if not error <= _MAX_ERROR:  # nor if it is NaN
            raise RuntimeError(f"another result than the reference's: error {error:.1e}")


def _numbers(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Without the choices of a router, which rounding can change; their weights are compared."""
    results = [results] if isinstance(results, Tensor) else results
    return [result.double() for result in results if result.is_floating_point()]


def _times(works: Sequence[Work], table: Mapping[Key, Any], budget_s: float) -> dict[str, float]:
    with using(table):
        return {
            f"{work.op}: {work.case}": time_call(work.run, work.device, budget_s=budget_s).seconds
            for work in works
        }


def tune(
    asked: Mapping[Key, Sequence[Work]], path: Path, seconds: float, *, budget_s: float = 0.05
) -> Iterator[Found]:
    """Search for all in order, each in an equal share of the time that is left. The table at `path`
    is up to date whenever one was found."""
    write_lines(path, {})
    end = time.monotonic() + seconds
    for index, (key, works) in enumerate(asked.items()):
        now = time.monotonic()
        if now > end:
            print(f"no time is left for {len(asked) - index} of {len(asked)}", flush=True)
            break
        deadline = now + (end - now) / (len(asked) - index)
        try:
            found = search(key, works, deadline, budget_s=budget_s)
        except Exception as error:  # whatever it is, the others are searched
            print(f"{key[0]}{key[1]} failed: {type(error).__name__}: {error}", flush=True)
            continue
        line = make_line(key, found.options, {"before_s": found.before, "after_s": found.after})
        write_lines(path, {key: line if found.is_faster else None})
        print(found, flush=True)
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
    parser.add_argument("--tiny", action="store_true", help="in Triton's interpreter, on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("torch detects no GPU, whose options are to be measured")
    importlib.import_module("llmc.kernels.triton")
    sizes = TINY if args.tiny else Sizes()
    configs = model_configs(args.model or ["llama-3.1-8b.json"], args.format)
    asked = asked_options(program_work(configs, device, sizes))
    asked = {key: works for key, works in asked.items() if args.only in key[0]}
    for _ in tune(asked, args.output_json, args.seconds):
        pass  # it prints and writes them


if __name__ == "__main__":
    main()
