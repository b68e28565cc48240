"""The contract between the engine and the runner: what one step does, and what came of it.

Plain data, no torch: the scheduler can be simulated, and the plan can cross a process border.
A request owns one *row* of the runner's tables while it runs. The plan carries changes: new rows
with their tokens, the blocks that each row gained, and the rows that were released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmc.image_input import ImageInput
from llmc.lora_request import LoRARequest
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
    row_state: Mapping[str, bytes] = field(default_factory=dict)  # of users' logits processors
    adapter_slot: int = 0  # of its LoRA adapter; 0: it has none
    images: Sequence[ImageInput] = ()  # of the prompt
    position_offset: int = 0  # added to the positions that the model sees
    num_candidates: int = 0  # of a beam: likeliest tokens to report with each draw
    snapshot: int | None = None  # its recurrent state is a copy of this one; None: it begins anew


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RowWork:
    """Tokens [start, start + num_tokens) of a row's history are computed in this step.

    `sample` is true when the last of them is the newest token of the row, so that a next token
    is drawn; false inside a chunked prefill.

    The last len(draft_token_ids) of the tokens are draft tokens, new to the runner: they are
    entered after the row's known ones, and a token is drawn after each of them too. So the row
    draws 1 + len(draft_token_ids) tokens; the engine decides how many of them are accepted.

    The last len(entered_token_ids) of the tokens are known to the engine but not to the runner,
    which drew others there or none: they are written into the row before it is computed.

    With `is_scored` (a prompt whose log-probabilities are wanted, or the vectors of its tokens)
    each token whose next one is known is scored: all of them inside the prompt, all but the last at
    its end.

    With `kept_blocks` the new blocks follow the first so many of the row's, in place of others.

    With a `snapshot` the recurrent state that the row then has is copied there.
    """

    row: int
    start: int
    num_tokens: int
    sample: bool
    new_blocks: Sequence[int] = ()  # physical block ids appended to the row's block table
    kept_blocks: int | None = None  # None: all
    draft_token_ids: Sequence[int] = ()
    entered_token_ids: Sequence[int] = ()  # never together with draft tokens
    is_scored: bool = False
    snapshot: int | None = None

    @property
    def num_samples(self) -> int:
        """Tokens that the step draws for this row."""
        return 1 + len(self.draft_token_ids) if self.sample else 0

    @property
    def num_scored(self) -> int:
        """Tokens whose next one gets a log-probability, or that have a vector themselves."""
        return self.num_tokens - self.sample if self.is_scored else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The contents of block `source`, in all layers, go to block `target` before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMask:
    """From this step on the row may draw only tokens whose bit is set; None lifts the mask.

    Token v has bit v % 32 of word v // 32 of `words`, little-endian int32.
    """

    row: int
    words: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCopy:
    """The weights of a LoRA adapter go from host memory to a slot, instead of what is there."""

    slot: int  # from 1
    adapter: LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, in this order: fill adapter slots, release rows, fill new rows, swap out, swap in,
    copy blocks and the states of new rows, compute `work`, copy states to snapshots.
    """

    step: int
    work: Sequence[RowWork]
    new_rows: Sequence[NewRow] = ()
    released_rows: Sequence[int] = ()
    block_copies: Sequence[BlockCopy] = ()
    swap_out: Sequence[BlockCopy] = ()  # from a block to a slot of host memory
    swap_in: Sequence[BlockCopy] = ()  # from a slot of host memory to a block
    row_masks: Sequence[RowMask] = ()
    adapter_copies: Sequence[AdapterCopy] = ()

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


# Of a token whose next one is known: that one's log-probability; of a model that pools, a vector.
Score = TokenLogprobs | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the runner drew: the samples of the plan's `work` items in order.

    `token_ids[i]` is None where that row's logits were not finite (its request must fail, the
    others go on). `logprobs[i]` is None where the request asked for none. `scores` are those of
    the scored prompt tokens, in the order of `work`. `vectors`, of a model that pools: the float32
    values of each sample, in this machine's byte order; their tokens mean nothing. There `scores`
    are vectors too, None where one is not finite.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = field(default=())
    scores: Sequence[Score | None] = ()
    vectors: Sequence[bytes] = ()


class PendingStep(Protocol):
    """A step that was handed to the runner and may still be running."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what went wrong in it; EngineDeadError if no later step can
        succeed either. After an error the results of the steps submitted later are void, and so
        are the rows of all these steps: the engine releases and fills them anew. All other rows
        and the blocks that they hold must be unchanged.
        """


class Runner(Protocol):
    """What the engine needs of a runner: steps are submitted, and run, in order."""

    @property
    def max_in_flight(self) -> int:
        """How many steps may be submitted before the result of the first is read; at least 1."""

    @property
    def num_runtime_compiles(self) -> int:
        """Compilations that a step had to wait for."""

    def use_idle_time(self) -> bool:
        """Do a little of what would delay a step. -> whether there may be more to do."""

    def start_profile(self) -> None:
        """Record what steps do from now on. Raises RuntimeError while one is recorded."""

    def stop_profile(self, folder: str) -> str:
        """Write the record to a file in `folder`. -> its path. RuntimeError when there is none."""

    def give_back_caches(self) -> int:
        """Return the memory of the caches, whose contents nobody needs, until they are written to.
        -> its bytes. Raises RuntimeError where that is not possible."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step and return at once. Never raises for the content of one request."""
