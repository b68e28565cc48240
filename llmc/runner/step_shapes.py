"""Chooses a step's sizes: padded to those of a CUDA graph, or else to the step's minimum."""

from __future__ import annotations

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import EagerReason, StepPlan
from llmc.runner.buckets import MAX_MIXED_TOKENS, Buckets, mixed_tokens
from llmc.runner.delta import prompts_of
from llmc.runner.graphs import StepGraphs, StepShape
from llmc.runner.step_buffers import StepBuffers

# Query-key pairs of a prompt. From here on, computing attention over latents in expanded form saves
# more than launching the kernels one by one costs (an estimate for 16 heads, not measured).
_EXPANDED_PAIRS = 1024**2


class StepShapes:
    """Without `graphs` nothing is padded to them. `expanded_from`: the fewest tokens of a prompt
    whose latents attention expands; None if there is no such attention."""

    def __init__(
        self,
        buckets: Buckets,
        buffers: StepBuffers,
        graphs: StepGraphs | None,
        *,
        expanded_from: int | None,
        max_model_len: int,
    ) -> None:
        self._buckets = buckets
        self._buffers = buffers
        self._graphs = graphs
        self._expanded_from = expanded_from
        self._max_model_len = max_model_len

    def choose(self, plan: StepPlan, step: StepFunction) -> tuple[StepShape, EagerReason]:
        """The step's sizes with dummies, and the reason if it has no graph."""
        rows = len(plan.work)
        if plan.is_decode and rows:
            size = rows
            if self._graphs is not None:
                size = self._buckets.choose(rows)
                self._buckets.observe(rows)
            too_large = rows > self._buckets.sizes[-1]
            least = 1 if step.uncompiled is not None else step.min_size
            shape = StepShape.decode(max(size, least))
            if self._graphs is not None:
                self._graphs.want(step, shape)
            return shape, "too_large" if too_large else "not_captured"
        tokens = sum(work.num_tokens for work in plan.work)
        samples = sum(work.num_samples + work.num_scored for work in plan.work)
        reason: EagerReason = "not_captured"
        if rows == 0:
            return StepShape(0, 0, 0), reason
        if self._graphs is not None:
            if self._expands_much(plan):
                reason = "long_prompts"  # the sizes are read on the host, which a graph can't do
            elif (padded := self._padded(tokens, rows, samples, step.min_size)) is None:
                reason = "too_large"
            elif self._graphs.want(step, padded):
                return padded, reason
        padding = max(0, step.min_size - min(rows, samples))
        return StepShape(tokens + padding, rows + padding, samples + padding), reason

    @property
    def largest(self) -> StepShape | None:
        """The largest shape that a step with prompts is padded to; None if all are decodes."""
        most_rows = self._buffers.max_requests - 2
        requests = min(self._buckets.choose(most_rows + 1), self._buffers.max_requests)
        most = min(self._buffers.max_tokens, MAX_MIXED_TOKENS, requests * self._max_model_len)
        tokens = max((n for n in range(most, requests, -1) if mixed_tokens(n) == n), default=0)
        return StepShape(tokens, requests, requests) if tokens else None

    def _expands_much(self, plan: StepPlan) -> bool:
        if self._expanded_from is None:
            return False
        prompts = prompts_of(plan, self._expanded_from, started=True)
        pairs = zip(prompts.lengths, prompts.contexts, strict=True)
        return any(length * context >= _EXPANDED_PAIRS for length, context in pairs)

    def _padded(self, tokens: int, rows: int, samples: int, min_rows: int) -> StepShape | None:
        """The shape of the graph that would serve a step with prompts or draft tokens."""
        is_exact = tokens == mixed_tokens(tokens) and samples == rows >= min_rows
        # otherwise at least one dummy for the padding tokens
        requests = self._buckets.choose(rows if is_exact else rows + 1)
        padding = requests - rows
        padded = mixed_tokens(tokens + padding)
        fits = (
            padded is not None
            and requests <= self._buffers.max_requests
            and padded <= self._buffers.max_tokens
            and padded - tokens <= padding * self._max_model_len
        )
        if not (padded and fits):
            return None
        most = _padded_samples(samples + padding, tokens + padding, padded, requests)
        return StepShape(padded, requests, most)


def _padded_samples(samples: int, tokens: int, padded: int, requests: int) -> int:
    """Samples of a step of `tokens` tokens, each dummy computing one, if it is padded to `padded`.

    One per request, although a prompt may end in a later step; of a step of draft tokens, one per
    token. Other numbers would need a graph each.
    """
    for wanted in (requests, padded):
        if samples <= wanted <= samples + padded - tokens:
            return wanted
    return samples
