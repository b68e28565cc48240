"""ModelRunner: a plan in, tokens out. Owns the rows and the caches; the graph owns the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import StepPlan, StepResult, TokenLogprobs
from llmc.passes.append_sampler import PER_ROW, TABLES
from llmc.runner.prepare import PackedStep, prepare
from llmc.runner.rows import RowTables


def default_buckets(max_rows: int) -> tuple[int, ...]:
    """Decode batch sizes: 1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 64 from there."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_rows + 64, 64)]
    return (*[s for s in sizes if s < max_rows], max_rows)


class ModelRunner:
    """Executes plans one after the other; implements the engine's Runner protocol.

    `step` may be replaced by one of another level at any time: all levels share rows and caches.
    """

    def __init__(
        self, step: StepFunction, rows: RowTables, buckets: Sequence[int] | None = None
    ) -> None:
        self.step = step
        self.rows = rows
        self.buckets = tuple(buckets or default_buckets(rows.padding_row))
        self._tables = {
            name: rows.tables[name] for name in (*TABLES, *PER_ROW) if name in step.inputs
        }
        self._packed_inputs = tuple(n for n in step.inputs if n not in self._tables)

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's deltas, run the step, and bring the drawn tokens home."""
        self._apply(plan)
        if not plan.work:
            return StepResult(token_ids=())
        with torch.inference_mode():
            packed, tokens, logits = self._compute(plan)
            # the next step reads its input here; the host is told below
            self.rows.tables["history"][packed.row, packed.length.long()] = tokens.int()
            return self._result(plan, packed, tokens, logits)

    def logits(self, plan: StepPlan) -> Tensor:
        """The unprocessed logits [rows that sample, V] of a plan; nothing is drawn or kept."""
        self._apply(plan)
        with torch.inference_mode():
            packed, _, logits = self._compute(plan)
            return logits[: packed.num_sampled].clone()

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            self.rows.release(row)
        for new in plan.new_rows:
            self.rows.fill(new)
        self.rows.append_blocks(plan.work)

    def _compute(self, plan: StepPlan) -> tuple[PackedStep, Tensor, Tensor]:
        step = self.step  # may be exchanged by another thread between two steps
        packed = prepare(self.rows, plan, self._padding(plan, step), step.min_size)
        return packed, *self._run(step, packed)

    def _padding(self, plan: StepPlan, step: StepFunction) -> int:
        """Dummy rows: up to the bucket in a decode step, up to the step's least size in any."""
        rows = len(plan.work)
        if plan.is_decode:
            bucket = next((b for b in self.buckets if b >= rows), rows)
            return max(bucket, step.min_size) - rows
        sampled = sum(1 for work in plan.work if work.sample)
        return max(0, step.min_size - min(rows, sampled))

    def _run(self, step: StepFunction, packed: PackedStep) -> tuple[Tensor, Tensor]:
        inputs = {name: getattr(packed, name) for name in self._packed_inputs}
        return step.call(**inputs, **self._tables)

    def _result(
        self, plan: StepPlan, packed: PackedStep, tokens: Tensor, logits: Tensor
    ) -> StepResult:
        ids = [t if t >= 0 else None for t in tokens[: packed.num_sampled].tolist()]
        wanted = [self.rows.logprobs[w.row] for w in plan.work if w.sample]
        if all(n is None for n in wanted):
            return StepResult(token_ids=ids)
        return StepResult(token_ids=ids, logprobs=token_logprobs(logits, ids, wanted))


def token_logprobs(
    logits: Tensor, ids: Sequence[int | None], wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Log-softmax of the unprocessed logits [S, V] at the drawn tokens and at the top ones."""
    picked = [
        i
        for i, (t, n) in enumerate(zip(ids, wanted, strict=True))
        if t is not None and n is not None
    ]
    result: list[TokenLogprobs | None] = [None] * len(ids)
    if not picked:
        return result
    logprobs = logits[picked].float().log_softmax(-1)
    chosen = torch.tensor([ids[i] for i in picked], device=logits.device)[:, None]
    values = logprobs.gather(-1, chosen)
    ranks = (logprobs > values).sum(-1) + 1
    most = min(max(wanted[i] or 0 for i in picked), logprobs.shape[-1])
    top_values, top_ids = logprobs.topk(most, -1)
    for k, i in enumerate(picked):
        n = wanted[i] or 0
        result[i] = TokenLogprobs(
            token_id=int(chosen[k]),
            logprob=float(values[k]),
            rank=int(ranks[k]),
            top_token_ids=top_ids[k, :n].tolist(),
            top_logprobs=top_values[k, :n].tolist(),
        )
    return result
