"""Passes steps directly to the runner: exact batches and contexts, without a scheduler.

The contexts are not computed, because the caches are already filled with random numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from bench.gpu.subject import Subject
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams

_WARM = 4


class DirectBatch:
    """`rows` requests with `context` tokens each, which decode one token per step."""

    def __init__(self, subject: Subject, rows: int, context: int, num_steps: int) -> None:
        info = subject.info
        self._rows, self._at = rows, context - 1
        per_row = -(-(context + num_steps) // info.block_size)
        if rows * per_row > info.num_blocks or context + num_steps > info.max_model_len:
            raise ValueError(
                f"{rows} requests of {context} tokens need {rows * per_row} blocks of "
                f"{info.num_blocks}, within a context of {info.max_model_len}"
            )
        blocks = random.Random(0).sample(range(info.num_blocks), rows * per_row)
        self._blocks: list[Sequence[int]] = [
            blocks[r * per_row : (r + 1) * per_row] for r in range(rows)
        ]
        self._new: tuple[NewRow, ...] = tuple(
            new_row(r, tokens) for r, tokens in enumerate(subject.prompts(rows, context))
        )

    def next(self) -> StepPlan:
        """The next decode step; the first one enters the requests."""
        new, self._new = self._new, ()
        work = [
            RowWork(
                row=r,
                start=self._at,
                num_tokens=1,
                sample=True,
                new_blocks=self._blocks[r] if new else (),
            )
            for r in range(self._rows)
        ]
        self._at += 1
        return StepPlan(step=0, new_rows=new, work=work)

    def leave(self) -> StepPlan:
        return StepPlan(step=0, work=(), released_rows=tuple(range(self._rows)))


def new_row(row: int, tokens: Sequence[int]) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(temperature=0.0),
        seed=row,
        stop_token_ids=(),
    )


def decode_seconds(subject: Subject, rows: int, context: int, num_steps: int) -> float:
    """Device seconds per decode step. Many are queued, so that the device never waits for the host
    (if launching takes longer than the step, this is the host's time)."""
    batch = DirectBatch(subject, rows, context, num_steps + _WARM + 1)
    runner = subject.runner
    for _ in range(_WARM):
        runner.execute(batch.next())
    plans = [batch.next() for _ in range(num_steps)]
    seconds = _queued(runner, plans)
    runner.launch(batch.leave())
    return seconds


def _queued(runner: ModelRunner, plans: Sequence[StepPlan]) -> float:
    if runner.rows.device.type == "cpu":
        start = time.perf_counter()
        for plan in plans:
            runner.execute(plan)
        return (time.perf_counter() - start) / len(plans)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launched = [runner.launch(plan) for plan in plans]
    end.record()
    end.synchronize()
    for step in launched:
        runner.collect(step)
    return float(begin.elapsed_time(end)) * 1e-3 / len(plans)


def prefill_plan(subject: Subject, tokens: int) -> StepPlan:
    """One prompt, whole, in one step."""
    new = new_row(0, subject.prompts(1, tokens)[0])
    blocks = tuple(range(-(-tokens // subject.info.block_size)))
    work = RowWork(row=0, start=0, num_tokens=tokens, sample=True, new_blocks=blocks)
    return StepPlan(step=0, new_rows=(new,), work=(work,))
