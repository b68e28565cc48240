"""Messages between the frontend and the engine: plain data that can cross process boundaries.

The frontend converts between text and token ids; the engine only sees ids. Stop *tokens* are
therefore detected by the engine, and stop *strings* by the frontend, which then sends AbortRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmc.engine.plan import TokenLogprobs
from llmc.image_input import ImageInput
from llmc.lora_request import LoRARequest
from llmc.outputs import FinishReason
from llmc.sampling_params import SamplingParams

Operation = Literal["reset_prefix_cache", "release_caches", "start_profile", "stop_profile"]
# Upper bounds of the buckets in EngineStats.step_sizes, in tokens; a final bucket has all above.
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One sequence to generate (a request with n > 1 is n of these).

    `fork_of` names an earlier request with the same prompt and salt: the two compute the prompt
    once and share its blocks, unless that request has finished by now.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0  # lower is served first, where the engine schedules by priority
    fork_of: str | None = None
    cache_salt: str | None = None  # requests with different salts share no cached prefix
    adapter: LoRARequest | None = None  # neither do requests with different adapters
    images: Sequence[ImageInput] = ()  # in the order of their tokens in the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetState:
    """Request the engine's state. The answer is one EngineState, which is computed on demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operate:
    """An operator's order, carried out between two steps. It does not affect requests' outputs.

    `folder` is where "stop_profile" writes. The answer is an OperationResult with that `number`.
    """

    number: int  # chosen by the frontend
    operation: Operation
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The outcome of an Operate: a human-readable `result`, or the `error` that prevented it."""

    number: int
    result: str = ""
    error: str | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RequestUpdate:
    """The outcome of a step for one request: the tokens drawn, and whether it has finished.

    `stop_reason` is the id if one of `stop_token_ids` ended the output, None for an end token of
    the model. A stop token that ends the output is the last of `new_token_ids`; with `is_whole`
    there is none, because a structured output was complete without it. `prompt_logprobs` come with
    the first token, one for each prompt token but the first; with max_tokens 0 there is no token,
    and one update. A pooling model returns `vector` alone: float32 values in native byte order, and
    one vector per prompt token, in order, if `prompt_logprobs` were requested. `error` comes with
    finish_reason "error"; with `is_refused` the request itself is at fault, and would fail again.
    """

    request_id: str
    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_whole: bool = False
    num_cached_tokens: int = 0
    queue_s: float | None = None  # from arrival to first step; None before that
    num_preemptions: int = 0
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vector: bytes = b""
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """The output of one engine iteration: updates of requests, and statistics afterwards."""

    updates: Sequence[RequestUpdate]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for logs, /metrics and the status line: cumulative counters, current gauges."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_steps: int
    num_swaps: int  # preemptions that kept their blocks in host memory
    num_failed_steps: int  # steps that raised; differs from the number of failed requests
    num_wasted_row_steps: int  # parts of steps dropped because their request had ended
    num_runtime_compiles: int  # compilations that a step had to wait for
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_drafts: int = 0  # times that a request had draft tokens in a step
    num_draft_tokens: int = 0  # draft tokens in these steps
    num_accepted_tokens: int = 0  # draft tokens equal to what the model drew
    num_deferred: int = 0  # waiting requests that need a grammar, an adapter or another's prompt
    num_cached_prompt_tokens: int = 0  # prompt tokens not computed for their request
    num_step_tokens: int = 0  # tokens of all steps
    # the values of `eager_steps`
    num_eager_not_captured: int = 0
    num_eager_images: int = 0
    num_eager_long_prompts: int = 0
    num_eager_too_large: int = 0
    step_sizes: Sequence[int] = ()  # number of steps in each bucket of STEP_SIZES

    @property
    def eager_steps(self) -> Mapping[str, int]:
        """Steps without a CUDA graph where graphs are used, by their EagerReason."""
        return {
            "not_captured": self.num_eager_not_captured,
            "images": self.num_eager_images,
            "long_prompts": self.num_eager_long_prompts,
            "too_large": self.num_eager_too_large,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the engine is doing right now, for monitoring. Its size is bounded."""

    time_s: float  # on the engine's clock, to compute rates
    collect_s: float  # CPU time spent on this, so that callers can limit how often they poll
    stats: EngineStats
    num_rows: int  # requests that can run at a time
    step_tokens: int  # maximum tokens per step
    block_size: int  # tokens per block
    blocks: BlockMap
    requests: Sequence[RequestView]  # running ones first, then waiting ones; at most 64
    finished: Sequence[FinishedRequest]  # the last 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """The block pool as a map of cells of `blocks_per_cell` blocks; the last cell may have fewer.

    `runs` are flat pairs: a state, and how many consecutive cells have it (run-length encoding).
    The states are 0 blank, 1 cached, 2 used, 3 used by several requests; a cell has the highest
    state of its blocks. Blank, cached and used blocks add up to all blocks.
    """

    num_blank: int
    num_cached: int  # also free, but with contents that a later request may reuse
    num_used: int
    num_shared: int  # used blocks that have several users
    num_saved: int  # additional blocks that would be used if nothing were shared
    blocks_per_cell: int
    runs: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A running or waiting request. `number` counts arrivals and does not reveal its id."""

    number: int
    state: str  # running, waiting or preempted
    row: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    age_s: float
    first_token_s: float | None  # from arrival to first token; None before that
    block_runs: Sequence[int]  # runs of its first blocks, flat pairs: first block, length


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    number: int
    num_output_tokens: int
    first_token_s: float | None
    total_s: float
