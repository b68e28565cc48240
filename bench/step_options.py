"""Measures launch options by the time of whole decode steps, each a CUDA graph of an engine.

A graph is captured anew for every candidate, with the real step's inputs and caches, and replayed.
The engine's own graphs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.clock import time_in_turn
from bench.gpu.direct import DirectBatch
from bench.gpu.subject import Subject
from bench.option_search import GAIN, Found, check, only_kernels, search_all
from bench.tuned_table import Asked, using, write_lines
from llmc.kernels import tuned
from llmc.kernels.tuned import Key
from llmc.runner.graphs import StepShape

Replay = Callable[[], Tensor]  # -> the step's logits [rows, V], valid until the next one
_FINAL_S = 0.2  # per graph, to time all kept options


class Step:
    """The decode step of `rows` requests with `context` tokens each. The right logits are those
    with the code's own options."""

    def __init__(self, subject: Subject, name: str, rows: int, context: int) -> None:
        self.name = f"decode step of {rows} x {context} tokens, {name}"
        self._runner, self._rows = subject.runner, rows
        self._shape = StepShape.decode(subject.runner.buckets.choose(rows))
        batch = DirectBatch(subject, rows, context, 2)
        self._enter, self._plan, self._leave = batch.next(), batch.next(), batch.leave()
        with using({}):
            self._wanted = self._logits()

    def asked(self) -> list[Key]:
        """The keys of the options that its kernels ask for."""
        asked = Asked()
        with using(asked):
            self.run()
        return list(asked)

    def run(self) -> None:
        self._runner.dummy_run(self._shape.requests)

    def seconds(self, tables: Sequence[Mapping[Key, Any]], budget_s: float) -> list[float]:
        """The times of its graphs with these options, replayed in turn. Raises an error where a
        kernel can't be compiled, or the logits are not the right ones."""
        replays = []
        for table in tables:
            with using(table):
                check([self._logits()], [self._wanted])  # before anything is captured that fails
                replays.append(self._captured())
        return time_in_turn(replays, self._runner.rows.device, budget_s=budget_s)

    def _logits(self) -> Tensor:
        """Enter the requests, whose rows other steps use too, and run the step without a graph."""
        with using({}):
            self._runner.execute(self._leave)
            self._runner.execute(self._enter)
        with only_kernels():
            return self._runner.logits(self._plan)

    def _captured(self) -> Replay:
        runner, table = self._runner, tuned.load_table()
        if not runner.has_graphs:  # on a CPU

            def run() -> Tensor:
                with using(table):
                    return runner.logits(self._plan)

            return run
        graph = runner.capture_again(self._shape)
        runner.execute(self._plan)  # which the graph replays

        def replay() -> Tensor:
            return graph.replay()[1][: self._rows]

        check([replay()], [self._wanted])
        return replay


class Steps:
    """Steps that ask for the same options. A kernel is only a part of a step, so less than of
    single calls is worth keeping; what all kept options save is compared in the end."""

    gain = noise = 0.997

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def run(self) -> None:
        for step in self._steps:
            step.run()

    def seconds(self, budget_s: float) -> dict[str, float]:
        table = tuned.load_table()
        return {step.name: step.seconds([table], budget_s)[0] for step in self._steps}


def tune_steps(
    steps: Sequence[Step], path: Path, seconds: float, *, only: str = "", budget_s: float = 0.05
) -> list[Found]:
    """Search one key after the other, with the options kept so far, and write those that make
    whole steps faster. A key that several steps ask for is tuned for all of them."""
    write_lines(path, {})
    asked: dict[Key, list[Step]] = {}
    for step in steps:
        for key in step.asked():
            if only in key[0]:
                asked.setdefault(key, []).append(step)
    kept: dict[Key, Any] = {}
    searched: list[Found] = []
    for found in search_all(asked, Steps, seconds, kept=kept, budget_s=budget_s):
        searched.append(found)
        if found.is_faster:
            kept[found.key] = found.options
    written = compared(asked, searched)
    removed = dict.fromkeys(found.key for found in searched)
    write_lines(path, {**removed, **{found.key: found.line for found in written}})
    return written


def compared(asked: Mapping[Key, Sequence[Step]], searched: Sequence[Found]) -> list[Found]:
    """The kept options, with the times of the steps that ask for them: with none of them, and with
    all. Those whose steps are not faster are left out, and the others compared again."""
    kept = [found for found in searched if found.is_faster]
    while kept:
        table = {found.key: found.options for found in kept}
        steps = {step.name: step for key in table for step in asked[key]}
        times = {name: step.seconds([{}, table], _FINAL_S) for name, step in steps.items()}
        whole = []
        for found in kept:
            names = [step.name for step in asked[found.key]]
            before, after = ({name: times[name][i] for name in names} for i in range(2))
            whole.append(replace(found, before=before, after=after, gain=GAIN))
        kept = [found for found in whole if found.is_faster]
        for found in whole:
            print(f"all together: {found}", flush=True)
        if len(kept) == len(whole):
            break
    return kept
