"""Messages between the frontend and the engine: plain data that can cross a process border.

The frontend converts between text and token ids; the engine sees ids only. Stop *strings* are
therefore found by the frontend, which then sends AbortRequest; stop *tokens* by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmc.engine.plan import TokenLogprobs
from llmc.image_input import ImageInput
from llmc.lora_request import LoRARequest
from llmc.outputs import FinishReason
from llmc.sampling_params import SamplingParams

Operation = Literal["reset_prefix_cache", "give_back_caches", "start_profile", "stop_profile"]
# Upper bounds of the counts in EngineStats.step_sizes, in tokens; a last count is for all above.
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One sequence to generate (a request with n > 1 is n of these).

    `fork_of` names an earlier request of the same prompt and salt: the two compute the prompt once
    and share its blocks, unless that request has ended by now.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0  # lower is served first, where the engine schedules by priority
    fork_of: str | None = None
    cache_salt: str | None = None  # requests of different salts share no cached prefix
    adapter: LoRARequest | None = None  # and neither do those of different adapters
    images: Sequence[ImageInput] = ()  # in the order of their tokens in the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetState:
    """Someone watches the engine. The answer is one EngineState; without this none is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operate:
    """An operator's order, which changes no answer. It is carried out between two steps.

    `folder` is where "stop_profile" writes. The answer is one Operated of the same `number`.
    """

    number: int  # of the frontend
    operation: Operation
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operated:
    """What came of an Operate: `result` is for people, `error` why it was not done."""

    number: int
    result: str = ""
    error: str | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RequestUpdate:
    """What a step did for one request: the tokens drawn, and whether it has ended.

    `stop_reason` is the id if one of `stop_token_ids` ended the text, None for an end token of the
    model. A stop token that ends the text is the last of `new_token_ids`; with `is_whole` there is
    none: a structured output was complete without it. `prompt_logprobs`, of each prompt token but
    the first, come with the first token. `vector` is all that a request to a model that pools
    gets: float32 values, in this machine's byte order; one of each token of the prompt, in order,
    where `prompt_logprobs` are asked for. `error` comes with finish_reason "error"; `is_refused`:
    the request was invalid and never began.
    """

    request_id: str
    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_whole: bool = False
    num_cached_tokens: int = 0
    queue_s: float | None = None  # from its arrival to its first step; None before that
    num_preemptions: int = 0
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vector: bytes = b""
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """What one turn of the engine brought: updates of requests, and the numbers afterwards."""

    updates: Sequence[RequestUpdate]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for logs, /metrics and the status line. Counters grow, gauges are as of now."""

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
    num_failed_steps: int  # that raised, which differs from the number of requests that failed
    num_wasted_row_steps: int  # a request's part in a step, dropped as the request had ended
    num_runtime_compiles: int  # that a step had to wait for
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_drafts: int = 0  # steps of a request with draft tokens
    num_draft_tokens: int = 0  # computed in those
    num_accepted_tokens: int = 0  # of those: equal to what the model drew
    num_deferred: int = 0  # of the waiting: for a grammar, an adapter or another's prompt
    num_cached_prompt_tokens: int = 0  # of the prompts' tokens: never computed for their request
    num_step_tokens: int = 0  # of all steps
    step_sizes: Sequence[int] = ()  # how many steps had up to STEP_SIZES[i] tokens, or more


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the engine does at this moment, for people who watch it. Its size is limited."""

    time_s: float  # of the engine's own clock, for rates
    collect_s: float  # of CPU, that this took: the asker decides how often to ask
    stats: EngineStats
    num_rows: int  # requests that can run at a time
    step_tokens: int  # the most tokens of a step
    block_size: int  # tokens of a block
    blocks: BlockMap
    requests: Sequence[RequestView]  # running ones first, then waiting ones; at most 64
    finished: Sequence[FinishedRequest]  # the last 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """The block pool, drawn as cells of `blocks_per_cell` blocks; the last cell may have fewer.

    `runs` are pairs, flat: a state and how many cells in a row have it. The states are 0 blank,
    1 cached, 2 used, 3 used by several requests; a cell shows the highest state of its blocks.
    Blank, cached and used blocks are all blocks.
    """

    num_blank: int
    num_cached: int  # free too, but with contents that a later request may find
    num_used: int
    num_shared: int  # of those, by several requests
    num_saved: int  # blocks that would be used in addition if nothing were shared
    blocks_per_cell: int
    runs: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request that runs or waits. Its `number` counts arrivals, and reveals no id."""

    number: int
    state: str  # running, waiting or preempted
    row: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    age_s: float
    first_token_s: float | None  # from its arrival; None before that
    block_runs: Sequence[int]  # of its first blocks, flat pairs: a block, and how many follow on it


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    number: int
    num_output_tokens: int
    first_token_s: float | None
    total_s: float
