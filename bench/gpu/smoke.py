"""`smoke`: what must work before anything is worth measuring, in seconds.

Every op runs once beside its reference. Then a tiny model decodes with and without graphs, which
must give the same bits, also after its step was replaced and captured anew from another thread.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.direct import DirectBatch
from bench.gpu.record import Record
from bench.gpu.settings import Settings
from bench.gpu.subject import Subject, release, running
from llmc.engine.plan import StepPlan, StepResult
from llmc.kernels.cpu.build import load
from llmc.kernels.registry import OPS, Impl, Op
from llmc.runner.device import open_device
from llmc.runner.model_runner import ModelRunner

_MAX_ERROR = {"float32": 1e-3, "bfloat16": 5e-2}  # relative to the largest value
_CONTEXT = 24
_STEPS = 6


def run(settings: Settings, record: Record) -> None:
    record.measure("ops", partial(every_op, settings))
    release()
    with running(settings, settings.smallest) as subject:
        record.measure("start", lambda: subject.startup)
        record.measure("graphs", partial(graphs_equal_eager_steps, subject))


def every_op(settings: Settings) -> dict[str, Any]:
    """The error of each op's first case in this dtype. Raises RuntimeError naming those that
    failed, after all have run."""
    chosen = _first_cases(_register(settings), settings)
    if settings.device == "cuda":
        _compile(chosen)
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for op, impl, case in chosen:
        name = op.name
        try:
            errors[name] = _error(op, impl, case)
        except Exception as error:  # whatever it is, the next op still runs
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    limit = _MAX_ERROR[settings.dtype]
    failed |= {n: f"error {e:.1e}" for n, e in errors.items() if not e <= limit}
    if failed or not errors:
        raise RuntimeError(f"{len(failed)} of {len(errors)} ops failed: {failed}")
    return {"num_ops": len(errors), "largest_error": max(errors.values()), "errors": errors}


def _register(settings: Settings) -> str:
    if settings.device == "cuda":
        importlib.import_module("llmc.kernels.triton")
        return "triton"
    importlib.import_module("llmc.kernels.cpu")
    load()
    return "cpu"


def _first_cases(kind: str, settings: Settings) -> list[tuple[Op, Impl, tuple[Any, ...]]]:
    found = []
    for _, op in sorted(OPS.items()):
        impl = next((i for i in op.impls if i.name == kind and i.available()), None)
        case = _first_case(op, impl, settings) if impl is not None else None
        if impl is not None and case is not None:
            found.append((op, impl, case))
    return found


def _compile(chosen: Sequence[tuple[Op, Impl, Sequence[Any]]]) -> None:
    """Compile the ops' kernels several at a time: one by one that takes 40 seconds."""
    from llmc.kernels.triton.launch import compiling_together

    with compiling_together():
        for _, impl, case in chosen:
            with contextlib.suppress(Exception):  # reported when the op runs
                _effect(impl.op(), case)


def _first_case(op: Op, impl: Impl, settings: Settings) -> tuple[Any, ...] | None:
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    cases = (case for maker in op.case_makers for case in maker(device, dtype))
    return next((case for case in cases if impl.supports(**op.bind(case))), None)


def _error(op: Op, impl: Impl, case: Sequence[Any]) -> float:
    """The largest deviation from the reference, in results and arguments."""
    want, got = _effect(op.reference, case), _effect(impl.op(), case)
    return max((_deviation(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def _effect(call: Any, case: Sequence[Any]) -> list[Tensor]:
    """A call's results, then its tensor arguments after the call."""
    given = [x.clone(memory_format=torch.preserve_format) if _is(x) else x for x in case]
    made = call(*given)
    results = [] if made is None else [*made] if isinstance(made, tuple) else [made]
    return [*results, *(x for x in given if _is(x))]


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _deviation(got: Tensor, want: Tensor) -> float:
    """Relative to the largest finite value; infinite if other values are not finite."""
    if not want.numel():
        return 0.0
    mine, theirs = got.double(), want.double()
    finite = theirs.isfinite()
    if not torch.equal(mine[~finite].nan_to_num(1, 2, 3), theirs[~finite].nan_to_num(1, 2, 3)):
        return float("inf")
    largest = theirs[finite].abs().max() if finite.any() else theirs.new_zeros(())
    deviation = (mine - theirs)[finite].abs().max() if finite.any() else largest
    return float(deviation / (1 + largest))


def graphs_equal_eager_steps(subject: Subject) -> dict[str, Any]:
    """Decode the same requests eagerly, with graphs, and with those of another step function that a
    second thread swapped in and captured."""
    runner = subject.runner
    eager = ModelRunner(
        runner.step,
        runner.rows,
        max_tokens=subject.options.max_num_batched_tokens,
        caches=runner.caches,
        device=open_device(runner.rows.device, max_in_flight=1),
    )
    sizes = [size for size in (1, 2, 4) if size in runner.buckets.sizes]
    found: dict[str, Any] = {"batches": sizes, "graphs": runner.has_graphs}
    want = {size: _decoded(subject, eager, size) for size in sizes}
    before = sum(runner.eager_steps.values())
    _compare(subject, runner, want, "with graphs")

    def swap_and_decode() -> None:
        runner.swap_step(replace(runner.step))
        while runner.use_idle_time(has_work=True):
            pass
        _compare(subject, runner, want, "after a swap in another thread")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(swap_and_decode).result()
    _compare(subject, runner, want, "back in the first thread")
    found["eager_steps"] = sum(runner.eager_steps.values()) - before
    if found["eager_steps"]:
        raise RuntimeError(f"{found['eager_steps']} steps ran without a graph")
    return found


def _compare(
    subject: Subject, runner: ModelRunner, want: dict[int, list[StepResult]], when: str
) -> None:
    for size, results in want.items():
        if _decoded(subject, runner, size) != results:
            raise RuntimeError(f"batch {size} {when}: other results than without graphs")


def _decoded(subject: Subject, runner: ModelRunner, rows: int) -> list[StepResult]:
    """Tokens and log-probabilities of a few steps of these requests, always the same."""
    batch = DirectBatch(subject, rows, _CONTEXT, _STEPS)
    plans = [_with_logprobs(batch.next()) for _ in range(_STEPS)]
    results = [runner.execute(plan) for plan in plans]
    runner.execute(batch.leave())
    return results


def _with_logprobs(plan: StepPlan) -> StepPlan:
    new = [replace(n, sampling=replace(n.sampling, logprobs=4)) for n in plan.new_rows]
    return replace(plan, new_rows=new)
