"""The interface between the engine and the runner: the plan of a step, and its result.

Plain data, no torch: the scheduler can be simulated, and plans can cross process boundaries.
A request owns one *row* of the runner's tables while it runs. A plan carries only changes: new rows
with their tokens, the blocks that each row gained, and the rows that were released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from llmc.image_input import ImageInput
from llmc.lora_request import LoRARequest
from llmc.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request that enters the runner (or re-enters it after preemption).

    `token_ids` are all tokens known so far: the prompt and, after preemption, the generated tokens.
    The first `num_prompt_tokens` of them are the prompt.
    """

    row: int
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # resolved, never None; random numbers depend only on (seed, position)
    stop_token_ids: Sequence[int]  # banned until sampling.min_tokens have been generated
    row_state: Mapping[str, bytes] = field(default_factory=dict)  # of users' logits processors
    adapter_slot: int = 0  # of its LoRA adapter; 0: none
    images: Sequence[ImageInput] = ()  # of the prompt
    position_offset: int = 0  # added to the positions that the model sees
    num_candidates: int = 0  # of a beam: how many most likely tokens to report with each draw
    snapshot: int | None = None  # to copy its initial recurrent state from; None: zeros


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RowWork:
    """Tokens [start, start + num_tokens) of a row's history are computed in this step.

    `sample` is true when the last of them is the newest token of the row, so that a next token
    is drawn; false inside a chunked prefill.

    The last len(draft_token_ids) of the tokens are draft tokens, which the runner does not have
    yet. It writes them after the row's known tokens, and also draws a token after each of them. So
    the row draws 1 + len(draft_token_ids) tokens; the engine decides how many are accepted.

    The last len(entered_token_ids) of the tokens are known to the engine but not to the runner,
    which drew other tokens there or none. They are written into the row before it is computed.

    With `is_scored` (log-probabilities of the prompt, or vectors of its tokens, were requested),
    each token whose next token is known is scored: all of them inside the prompt, all but the last
    at its end.

    With `kept_blocks`, the row keeps only its first `kept_blocks` blocks, and the new ones follow.

    With a `snapshot`, the row's recurrent state after the step is copied there.
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
        """Tokens whose successor gets a log-probability, or that get a vector themselves."""
        return self.num_tokens - self.sample if self.is_scored else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy block `source` to block `target`, in all layers, before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMask:
    """From this step on, the row can draw only tokens whose bit is set; None removes the mask.

    Token v has bit v % 32 of word v // 32 of `words`, little-endian int32.
    """

    row: int
    words: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCopy:
    """Copy the weights of a LoRA adapter from host memory to a slot, replacing its contents."""

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
        """Whether every row computes exactly one token and samples, as bucketed steps require."""
        return bool(self.work) and all(w.num_tokens == 1 and w.sample for w in self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one output position, before temperature and other processing."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


# Of a prompt token: the log-probability of the next token or, with a pooling model, its vector.
Score = TokenLogprobs | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens that the runner drew: the samples of the plan's `work` items in order.

    `token_ids[i]` is None where that row's logits were not finite (its request must fail, the
    others continue). `logprobs[i]` is None where the request asked for none. `scores` are those of
    the scored prompt tokens, in the order of `work`. A pooling model returns `vectors`, the float32
    values of each sample in native byte order, and its `token_ids` are meaningless. Its `scores`
    are vectors too, None where one is not finite.
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] = field(default=())
    scores: Sequence[Score | None] = ()
    vectors: Sequence[bytes] = ()


# Why a step ran without a CUDA graph: none of its shape was captured yet, or the capture failed; it
# reads images; the kernels of its prompts read lengths on the host; it is larger than all graphs.
EagerReason = Literal["not_captured", "images", "long_prompts", "too_large"]


class PendingStep(Protocol):
    """A step that was submitted to the runner and may still be running."""

    def result(self) -> StepResult:
        """Wait for the step. Raises the step's error, or EngineDeadError if no later step can
        succeed either.

        After an error, the results of steps submitted later are void, and so are the rows of all
        these steps, which the engine releases and refills. All other rows and their blocks must be
        unchanged.
        """


class Runner(Protocol):
    """The engine's interface to a runner. Steps run in the order in which they are submitted."""

    @property
    def max_in_flight(self) -> int:
        """How many steps can be submitted before the result of the first is read; at least 1."""

    @property
    def num_runtime_compiles(self) -> int:
        """Compilations that a step had to wait for."""

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        """Steps that ran without a CUDA graph, by the reason; empty if graphs are not used."""

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        """Do a small piece of work that would otherwise delay a step. -> whether more remains.

        `has_work`: requests are waiting, so only do what would delay every step.
        """

    def start_profile(self) -> None:
        """Start profiling steps. Raises RuntimeError if a profile is already being recorded."""

    def stop_profile(self, folder: str) -> str:
        """Write the profile to a file in `folder`. -> its path. RuntimeError if there is none."""

    def release_caches(self) -> int:
        """Release the memory of the caches, whose contents are not needed, until the next write.
        -> bytes released. Raises RuntimeError if that is not possible."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step and return at once. Never raises for the content of one request."""
