"""What the front says to the engine and hears back. Plain data, so that a process border fits in.

The front turns text into ids and ids into text; the engine sees ids only. Stop *strings* are
therefore found by the front, which then sends AbortRequest; stop *tokens* by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.engine.plan import TokenLogprobs
from llmc.outputs import FinishReason
from llmc.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One sequence to generate (a request with n > 1 is n of these).

    `fork_of` names another request of the same prompt and salt, sent before: the two then compute
    the prompt once and share its blocks. It may have ended by now; this one stands alone then.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0  # lower is served first, where the engine schedules by priority
    fork_of: str | None = None
    cache_salt: str | None = None  # requests of different salts share no cached prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str


@dataclass(slots=True, kw_only=True)  # not frozen: made per row per step, and frozen costs 3x
class RequestUpdate:
    """News of one request after a step: tokens that were drawn, and the end if it came.

    `stop_reason` is the stop token id when one of `stop_token_ids` ended the text, None for the
    model's own end token. A stop token that ends the text is the last of `new_token_ids`; with
    `is_whole` there was none: a structured output was complete with the token before it.
    `prompt_logprobs`, of each token of the prompt but the first, come with the first token.
    `error` comes with finish_reason "error"; `is_refused`: the request was wrong, and never began.
    """

    request_id: str
    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_whole: bool = False
    num_cached_tokens: int = 0
    queue_s: float | None = None  # from its arrival to its first step; None before that
    prompt_logprobs: Sequence[TokenLogprobs] = ()
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
    num_failed_steps: int  # that raised; they are not the same number as requests that failed
    num_wasted_row_steps: int  # of a request in a step, dropped because it had ended by then
    num_runtime_compiles: int  # that a step had to wait for
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_drafts: int = 0  # steps of a request in which tokens were guessed ahead
    num_draft_tokens: int = 0  # guessed ahead of the model, and computed
    num_accepted_tokens: int = 0  # of those: the model drew just so
