"""Request: one sequence while the engine serves it, and Extension: decoding beyond plain sampling.

Three counts describe a request's progress. `token_ids` are the tokens that the host knows.
`num_tokens` also counts those that steps in flight will draw. `num_computed` is how many of them
have been submitted to the runner; a step computes tokens from `num_computed` up to `num_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from llmc.engine.messages import FinishedRequest, RequestUpdate
from llmc.engine.plan import RowMask, RowWork, Score, TokenLogprobs
from llmc.image_input import ImageInput, Span
from llmc.lora_request import LoRARequest
from llmc.outputs import FinishReason
from llmc.sampling_params import SamplingParams

NOT_FINITE = (
    "the model's logits for this request were not finite (NaN or infinity), so there is no token "
    "or vector; the weights, the number format or a logits processor may be at fault"
)
NONE_ALLOWED = (
    "no token was left to sample: all allowed_token_ids are banned by bad_words, min_tokens or "
    "stop_token_ids, or the model's logits were not finite"
)


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, ahead of later arrivals, with the tokens it has
    FINISHED = "finished"


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request; mainly changed by kv/row_table.py.

    `blocks` is flat: the physical block of each group of layers for the first `block_size` tokens,
    then for the next, and so on. NO_BLOCK replaces blocks that a windowed group has freed.
    """

    blocks: list[int] = field(default_factory=list)
    num_freed: list[int] = field(default_factory=list)  # leading blocks that each group has freed
    capacity: int = 0  # tokens that fit
    digests: list[bytes] = field(default_factory=list)  # of full blocks, computed when needed
    num_published: int = 0  # leading blocks that are in the prefix cache, or have an equal there
    snapshot: int | None = None  # of its initial recurrent state (kv/snapshots.py)
    kept_at: int = 0  # number of tokens after which its state was last kept or restored
    known_to: int = 0  # tokens whose blocks were in the prefix cache, with or without a snapshot


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, the tokens generated so far, and the row and blocks in use.

    A request has a row exactly when it has blocks. After it has finished or was preempted, it may
    keep both for a step or two, until no step in flight (`num_in_flight`) uses them.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output
    eos_token_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()  # the end tokens and the request's own
    cache_salt: bytes = b""
    adapter: LoRARequest | None = None
    images: Sequence[ImageInput] = ()
    atomic_spans: Sequence[Span] = ()  # of the prompt: the tokens of each are computed in one step
    min_step_tokens: int = 1  # token budget that a step must have left to compute this request
    priority: int = 0
    row_state: Mapping[str, bytes] = field(default_factory=dict)  # see plan.NewRow
    extension: Extension | None = None  # None: plain sampling

    # Set by the scheduler and its parts.
    rank: tuple[int, int] = (0, -1)  # (priority, arrival); lower is served first
    state: RequestState = RequestState.WAITING
    row: int | None = None
    adapter_slot: int = 0  # while it has a row; 0: no adapter
    position_offset: int = 0  # of the positions that the model sees; above 0: a long sequence
    table: BlockTable = field(default_factory=BlockTable)
    siblings: list[Request] | None = None  # it and others of one prompt (parallel_sampling.py)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0  # planned steps whose result has not arrived
    num_cached_tokens: int | None = None  # of the prompt; None until it is first scheduled
    arrived_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None  # from arrival to first step; None before that
    num_preemptions: int = 0
    first_token_s: float | None = None  # from arrival to first token; None before that
    prompt_scores: list[Score | None] = field(default_factory=list)  # of all but the last token

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)
        if self.sampling.prompt_logprobs is not None:
            self.prompt_scores = [None] * (self.num_prompt_tokens - 1)

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing is generated: the token drawn at the end of the prompt is dropped."""
        return self.max_total_tokens == self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether requested scores of prompt tokens are still missing. They arrive in order."""
        return bool(self.prompt_scores) and self.prompt_scores[-1] is None

    @property
    def no_token_error(self) -> str:
        """The error if the runner could not draw a token, or compute a vector."""
        if self.sampling.allowed_token_ids is not None:
            return NONE_ALLOWED
        return NOT_FINITE if self.extension is None else self.extension.no_token_error

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def append(self, token: int, logprob: TokenLogprobs | None) -> RequestUpdate:
        """Append a drawn token. The update's `finish_reason` is set if it is the last one."""
        if self.is_prompt_only:
            return self._scored()
        self.token_ids.append(token)
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.arrived_s
        update = RequestUpdate(
            request_id=self.request_id,
            new_token_ids=(token,),
            logprobs=() if logprob is None else (logprob,),
            num_cached_tokens=self.num_cached_tokens or 0,
            queue_s=self.queue_s,
            num_preemptions=self.num_preemptions,
        )
        num_tokens = len(self.token_ids)
        if self.prompt_scores and num_tokens == self.num_prompt_tokens + 1:
            update.prompt_logprobs = self._prompt_logprobs()
        if (
            token in self.stop_token_ids
            and num_tokens - self.num_prompt_tokens > self.sampling.min_tokens
        ):
            update.finish_reason = "stop"
            update.stop_reason = None if token in self.eos_token_ids else token
        elif num_tokens >= self.max_total_tokens:
            update.finish_reason = "length"
        return update

    def _scored(self) -> RequestUpdate:
        """The only update of a request that generates nothing."""
        return RequestUpdate(
            request_id=self.request_id,
            prompt_logprobs=self._prompt_logprobs(),
            finish_reason="length",
            num_cached_tokens=self.num_cached_tokens or 0,
            queue_s=self.queue_s,
            num_preemptions=self.num_preemptions,
        )

    def _prompt_logprobs(self) -> list[TokenLogprobs]:
        return [score for score in self.prompt_scores if isinstance(score, TokenLogprobs)]

    def fork_from(self, parent: Request, token: int) -> None:
        """Continue from another request's tokens plus one. No drawn token may be in flight."""
        self.token_ids = [*parent.token_ids, token]
        self.num_tokens = len(self.token_ids)
        self.table.digests = parent.table.digests[:]

    def summary(self) -> FinishedRequest:
        return FinishedRequest(
            number=self.rank[1],
            num_output_tokens=self.num_output_tokens,
            first_token_s=self.first_token_s,
            total_s=time.monotonic() - self.arrived_s,
        )

    def ended(self, reason: FinishReason, error: str | None = None) -> RequestUpdate:
        """The update of a request that ends without a new token."""
        return RequestUpdate(
            request_id=self.request_id,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            error=error,
        )


class Extension:
    """How one request decodes if not by plain sampling, with all the state that this needs.

    Beam search, structured outputs and speculative decoding are one subclass each; the scheduler
    uses them only through these methods. The defaults are plain sampling.
    """

    num_candidates = 0  # NewRow.num_candidates
    parent: Request | None = None  # a request whose computed tokens this one continues
    no_token_error = NOT_FINITE  # the error if the runner could not draw a token

    def is_ready(self, request: Request) -> bool:
        """Whether the next token can be planned with the tokens that the host knows now."""
        return True

    def draft_tokens(self, request: Request) -> Sequence[int]:
        """Tokens to verify in the next step; as many of them as fit are planned."""
        return ()

    def on_draw(self, request: Request, work: RowWork, masks: list[RowMask]) -> None:
        """Called while a step that draws a token is planned; may extend `work` and `masks`."""

    def on_token(
        self, request: Request, token: int, logprob: TokenLogprobs | None
    ) -> RequestUpdate | None:
        """Called when a token was drawn, but not after the request has finished."""
        return request.append(token, logprob)

    def on_finish(self, request: Request, error: str | None) -> None:
        """Called when the request has ended, for whatever reason."""
