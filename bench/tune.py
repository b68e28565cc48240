"""Measures launch options on this GPU and keeps what is faster: `python -m bench.tune`.

Writes the table that serving reads (kernels/triton/tuned.json). Each search is one shape class of
one kernel: every candidate is compiled by a pool of processes, checked against the default's
result, and timed; an option stays where it takes less than 0.97 of the default's time. Searches go
in the order of their worth and end with `--seconds`. Lines of other chips stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import prompts
from bench.clock import time_call
from bench.tune_searches import SEARCHES, Search
from llmc.kernels.triton import tuned
from llmc.kernels.triton.tuned import TABLE
from llmc.load_test.report import write_json

Options = Mapping[str, int]
Key = tuple[str, str, str]
_GAIN = 0.97
_TOLERANCE = 3e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best options of a shape class; None where the default is as good."""

    key: Key
    options: Options | None
    ms: float
    default_ms: float
    tried: int
    failed: tuple[str, ...]


class _Asked(dict[Key, Options]):
    """A table that remembers what it was asked for."""

    def __init__(self, table: Mapping[Key, Options]) -> None:
        super().__init__(table)
        self.keys_asked: list[Key] = []

    def get(self, key: Key, default: Any = None) -> Any:
        self.keys_asked.append(key)
        return super().get(key, default)


def asked_for(search: Search, run: Callable[[], Tensor]) -> Key:
    """The line of the table that a search is about."""
    table = _Asked({})
    with mock.patch.object(tuned, "load_table", lambda: table):
        run()
    [key] = {key for key in table.keys_asked if key[1] == search.kernel}
    return key


def candidates(search: Search) -> Iterator[tuple[Options, ...]]:
    """The options of each group: all their combinations, the groups one after the other."""
    for group in search.groups:
        yield tuple(dict(zip(group, values, strict=True)) for values in product(*group.values()))


def with_options(key: Key, options: Options, run: Callable[[], Tensor]) -> Tensor:
    """The result under these options."""
    with mock.patch.object(tuned, "load_table", lambda: {key: options}):
        return run()


def search_one(search: Search, device: torch.device, pool: ProcessPoolExecutor | None) -> Found:
    run = search.make(device)
    key = asked_for(search, run)
    want = run().float()
    default = best_s = time_call(lambda: with_options(key, {}, run), device).seconds
    best: Options = {}
    tried, failed = 0, []
    for group in candidates(search):
        base = best
        if pool is not None:
            index = SEARCHES.index(search)
            list(pool.map(_compile, ((index, key, {**base, **options}) for options in group)))
        for options in group:
            tried += 1
            new = {**base, **options}
            try:
                got = with_options(key, new, run).float()
                if not torch.allclose(got, want, rtol=_TOLERANCE, atol=_TOLERANCE):
                    raise RuntimeError("another result than the default's")
                took = time_call(
                    lambda new=new: with_options(key, new, run), device, budget_s=0.03
                ).seconds
            except Exception as error:  # too much shared memory, say: the others are tried
                failed.append(f"{new}: {type(error).__name__}: {str(error)[:120]}")
                continue
            if took < best_s:
                best, best_s = new, took
    if best:  # again and longer: the least of many is lucky
        best_s = time_call(lambda: with_options(key, best, run), device).seconds
        default = time_call(lambda: with_options(key, {}, run), device).seconds
    return Found(
        key=key,
        options=best if best and best_s < _GAIN * default else None,
        ms=best_s * 1e3,
        default_ms=default * 1e3,
        tried=tried,
        failed=tuple(failed),
    )


def _compile(job: tuple[int, Key, Options]) -> None:
    """In a process of the pool: run once, which leaves the kernel in Triton's cache on disk."""
    index, key, options = job
    if index not in _RUNS:
        _RUNS.clear()
        _RUNS[index] = SEARCHES[index].make(torch.device("cuda"))
    try:
        with_options(key, options, _RUNS[index])
        torch.cuda.synchronize()
    except Exception:  # the process that times it meets the same, and tells
        return


_RUNS: dict[int, Callable[[], Tensor]] = {}


def merged(table: Mapping[str, Any], found: Sequence[Found], run: Mapping[str, Any]) -> Any:
    """The table with this run's lines; earlier ones of its chip stay where they were not sought."""
    sought = {one.key for one in found}
    kept = [
        line
        for line in table["lines"]
        if (line["chip"], line["kernel"], line["shape"]) not in sought
    ]
    new = [
        {"chip": one.key[0], "kernel": one.key[1], "shape": one.key[2],
         "options": dict(one.options), "ms": one.ms, "default_ms": one.default_ms}
        for one in found
        if one.options is not None
    ]  # fmt: skip
    return {"measured": [*table["measured"], run], "lines": [*kept, *new]}


def describe_search(device: torch.device, found: Sequence[Found]) -> dict[str, Any]:
    """Where and when, and what was sought, with what became of it."""
    return {
        **prompts.describe_run(device),
        "sought": [
            {"kernel": one.key[1], "shape": one.key[2], "tried": one.tried, "ms": one.ms,
             "default_ms": one.default_ms, "failed": list(one.failed)}
            for one in found
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=TABLE, help="the table to write")
    parser.add_argument("--seconds", type=float, default=540, help="no search starts after these")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU, and the table is of GPUs")
    device = torch.device("cuda", torch.cuda.current_device())
    end = time.monotonic() + args.seconds
    found: list[Found] = []
    # spawn: a forked process can't use CUDA
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for search in SEARCHES:
            if args.only not in search.kernel:
                continue
            if time.monotonic() > end:
                print("no time is left for the rest", flush=True)
                break
            one = search_one(search, device, pool)
            found.append(one)
            print(
                f"{one.key[1]:18} {one.key[2]:44} {one.default_ms:9.4f} -> {one.ms:9.4f} ms"
                f"  {one.options or 'as it is'}  ({one.tried} tried, {len(one.failed)} failed)",
                flush=True,
            )
            table = json.loads(TABLE.read_text(encoding="utf-8"))
            write_json(args.output, merged(table, found, describe_search(device, found)))


if __name__ == "__main__":
    main()
