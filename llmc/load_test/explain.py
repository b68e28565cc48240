"""`llmc bench explain`: what bounds a step, from the times and the work of its ops.

The engine runs as in serving, and also with a step whose ops are timed one by one (`observe.py`).
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.engine.plan import EagerReason
from llmc.errors import InvalidRequestError
from llmc.load_test.observe import NOT_COUNTED, ObservedStep, OpRow, merged
from llmc.load_test.offline import OfflineRun, check_fits, run_offline, usable_token_ids
from llmc.load_test.op_work import Work
from llmc.load_test.workloads import random_workload
from llmc.sampling_params import SamplingParams
from llmc.startup.start import Started

KINDS = {
    "linear": "linears",
    "attention": "attention",
    "norm": "norms",
    "recurrence": "recurrences",
    "sampler": "sampling",
    "collective": "collectives",
    "rest": "other ops",
}
_LEAST_SHARE = 0.01  # of a step; other ops with less are merged into one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The measured limits of the machine: read bandwidth, and the rate of a matrix product."""

    bytes_per_s: float
    operations_per_s: float

    def least_seconds(self, work: Work) -> float:
        return max(work.num_bytes / self.bytes_per_s, work.num_operations / self.operations_per_s)

    def nearer(self, work: Work) -> str:
        """The limit that a faster implementation would hit first."""
        by_memory = work.num_bytes / self.bytes_per_s
        return "compute" if work.num_operations / self.operations_per_s > by_memory else "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A step, or all steps of a prompt. `step_s`: as served; `rows`: sorted, the longest first.

    `eager_steps`: those of the steps as served that had no CUDA graph, where graphs are used.
    """

    title: str
    step_s: float
    eager_steps: Mapping[EagerReason, int]
    rows: tuple[OpRow, ...]
    limits: Limits

    @property
    def ops_s(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def collectives_s(self) -> float:
        """The time in which ranks communicated and waited for each other."""
        return sum(row.seconds for row in self.rows if row.kind == "collective")

    @property
    def bound_by(self) -> str:
        """memory, compute, host, or collectives: whichever accounts for most of the time."""
        spent = {"host": max(0.0, self.step_s - self.ops_s), "memory": 0.0, "compute": 0.0}
        spent["collectives"] = self.collectives_s
        for row in self.rows:
            if row.kind != "collective":
                spent[self.limits.nearer(row.work)] += row.seconds
        return max(spent, key=lambda limit: spent[limit])

    @property
    def verdict(self) -> str:
        """What bounds the step, and how close it is to the limit, in one line."""
        limit = self.bound_by
        if limit == "host":
            return (
                f"bound by the host: the ops take {self.ops_s * 1e3:.2f} of "
                f"{self.step_s * 1e3:.2f} ms"
            )
        if limit == "collectives":
            return (
                f"bound by communication between ranks: {self.collectives_s * 1e3:.2f} of "
                f"{self.ops_s * 1e3:.2f} ms"
            )
        kinds: defaultdict[str, list[OpRow]] = defaultdict(list)
        for row in self.rows:
            if row.kind != "collective" and self.limits.nearer(row.work) == limit:
                kinds[row.kind].append(row)
        kind, rows = max(kinds.items(), key=lambda item: sum(row.seconds for row in item[1]))
        seconds = sum(row.seconds for row in rows)
        if limit == "memory":
            count = sum(row.work.num_bytes for row in rows)
            return (
                f"bound by memory: {KINDS[kind]} move {count / 1e6:.0f} MB at "
                f"{count / seconds / self.limits.bytes_per_s:.0%} of "
                f"{self.limits.bytes_per_s / 1e9:.0f} GB/s"
            )
        count = sum(row.work.num_operations for row in rows)
        return (
            f"bound by compute: {KINDS[kind]} do {count / 1e9:.1f} GFLOP at "
            f"{count / seconds / self.limits.operations_per_s:.0%} of "
            f"{self.limits.operations_per_s / 1e9:.0f} GFLOP/s"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "step_seconds": self.step_s,
            "eager_steps": dict(self.eager_steps),
            "ops_seconds": self.ops_s,
            "collectives_seconds": self.collectives_s,
            "bound_by": self.bound_by,
            "verdict": self.verdict,
            "ops": [
                {
                    "kind": row.kind,
                    "name": row.name,
                    "calls": row.num_calls,
                    "seconds": row.seconds,
                    "bytes": row.work.num_bytes,
                    "flop": row.work.num_operations,
                    "least_seconds": self.limits.least_seconds(row.work),
                    "limit": self.limits.nearer(row.work),
                }
                for row in self.rows
            ],
        }


def explain_steps(
    started: Started,
    *,
    batch_size: int,
    context_len: int,
    input_len: int,
    num_iters: int,
    limits: Callable[[], Limits],
    advance: Callable[[], None] = lambda: None,
) -> list[Explanation]:
    """Explain a decode step of `batch_size` requests with at least `context_len` tokens, and a
    prompt of `input_len` tokens, each the median of `num_iters`. InvalidRequestError if they do not
    fit.

    `advance` is called four times, after each run. `limits` are measured last, so that the memory
    they use does not count as the engine's.
    """
    budget = started.engine.scheduler.layout.step_tokens
    # Requests decode while the prompts after theirs are computed.
    ahead = batch_size * context_len // max(1, budget - batch_size) + 1
    count = num_iters + NOT_COUNTED
    tokens = usable_token_ids(started.info)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    seeds = itertools.count()  # a repeated prompt would be a prefix cache hit

    def run(num: int, length: int, output_len: int) -> OfflineRun:
        requests = random_workload(
            num_prompts=num,
            input_len=length,
            output_len=output_len,
            token_ids=tokens,
            seed=next(seeds),
        )
        check_fits(requests, started.info)
        return run_offline(started.engine, requests, sampling)

    def decode() -> OfflineRun:
        return run(batch_size, context_len - 1, ahead + count + 1)

    needed = batch_size * (context_len + ahead + count)
    if needed > started.info.pool_tokens:
        raise InvalidRequestError(
            f"{batch_size} requests of {context_len} tokens need {needed} tokens of KV cache, "
            f"but it has {started.info.pool_tokens}; lower --batch-size or --context-len, or "
            "raise --kv-cache-memory"
        )
    replayed = started.runner.num_replayed_steps
    run(batch_size, 2, count + 1)  # warms up, and shows whether steps are replayed
    observed = ObservedStep(started, replays=started.runner.num_replayed_steps > replayed)
    advance()
    served = started.runner.step
    # Not `swap_step`: that would wait for CUDA graphs, which can't hold the clock's events.
    started.runner.step = observed.step
    try:
        decode()
        decode_rows = observed.rows(decode_of=batch_size)
        advance()
        for _ in range(count):
            run(1, input_len, 1)
        prompt_rows = observed.rows()
        advance()
    finally:
        started.runner.step = served
    while started.runner.use_idle_time(has_work=True):
        pass  # another step has run, so the graphs of this one are gone
    eager = [Counter(started.runner.eager_steps)]
    decode_s = statistics.median(decode().traces[-1].itls_s[NOT_COUNTED:count])
    eager.append(Counter(started.runner.eager_steps))
    prompt_s = statistics.median([run(1, input_len, 1).duration_s for _ in range(num_iters)])
    eager.append(Counter(started.runner.eager_steps))
    advance()
    found = limits()
    plural = "s" if batch_size > 1 else ""
    return [
        Explanation(
            title=f"decode step, {batch_size} request{plural} of {context_len} tokens",
            step_s=decode_s,
            eager_steps=eager[1] - eager[0],
            rows=_sorted(decode_rows),
            limits=found,
        ),
        Explanation(
            title=f"prompt of {input_len} tokens",
            step_s=prompt_s,
            eager_steps=eager[2] - eager[1],
            rows=_sorted(prompt_rows),
            limits=found,
        ),
    ]


def _sorted(rows: Sequence[OpRow]) -> tuple[OpRow, ...]:
    """Sort by time; the shortest of the other ops become one row."""
    least = _LEAST_SHARE * sum(row.seconds for row in rows)
    small = [row for row in rows if row.kind == "rest" and row.seconds < least]
    kept = [row for row in rows if row not in small]
    if small:
        kept.append(merged("rest", "others", small))
    return tuple(sorted(kept, key=lambda row: -row.seconds))
