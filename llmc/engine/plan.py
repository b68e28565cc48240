"""The contract between the engine and the runner: what one step does, and what came of it.

Plain data, no torch: the scheduler can be simulated, and the plan can cross a process border.
A request owns one *row* of the runner's tables for as long as it runs. The plan carries deltas:
new rows with their tokens, the blocks that each row gained, and the rows that were given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request that enters the runner (or re-enters it after preemption).

    `token_ids` are all tokens known so far (the prompt, and after preemption what was generated);
    the first `num_prompt_tokens` of them are the prompt.
    """

    row: int
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # resolved: never None; random numbers depend on (seed, position) alone
    stop_token_ids: Sequence[int]  # banned while fewer than sampling.min_tokens are out


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RowWork:
    """Tokens [start, start + num_tokens) of a row's history are computed in this step.

    `sample` is true when the last of them is the newest token of the row, so that a next token
    is drawn; false inside a chunked prefill.
    """

    row: int
    start: int
    num_tokens: int
    sample: bool
    new_blocks: Sequence[int] = ()  # physical block ids appended to the row's block table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: first release rows, then fill new rows, then compute `work` in this order."""

    step: int
    work: Sequence[RowWork]
    new_rows: Sequence[NewRow] = ()
    released_rows: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    @property
    def is_decode(self) -> bool:
        """Every row computes exactly one token and samples: the shape that buckets serve."""
        return bool(self.work) and all(w.num_tokens == 1 and w.sample for w in self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one output position, before temperature and other processing."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the runner drew, aligned with the plan's `work` items that sample.

    `token_ids[i]` is None where that row's logits were not finite (the request must fail, the
    others go on). `logprobs[i]` is None where the request asked for none.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = field(default=())
