"""Outputs for callers: `RequestOutput` and its parts, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort", "error"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token before temperature and other processing; rank 1 is the best."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt, so far or finished.

    `logprobs[i]` maps token ids to their Logprob at output position i: the chosen token and the
    top alternatives. `stop_reason` is the stop string or stop token id that ended the text, and
    None for the model's own end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds, from one monotonic clock."""

    queue_s: float  # from arrival at the engine to the first step
    time_to_first_token_s: float
    end_to_end_s: float


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt. `error` has the reason if the request could not be served.

    `prompt_logprobs[i]` is for prompt token i, as in CompletionOutput.logprobs; None for the
    first token, which has no context.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence found by beam search. `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    cum_logprob: float  # of the tokens after the prompt, including an end token
    text: str | None = None  # None without a tokenizer
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of one prompt, best first.

    `error` has the reason if the prompt could not be served.
    """

    sequences: list[BeamSearchSequence]
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """A vector, or one per token of the prompt: hidden states or embeddings, or a classifier's
    scores or probabilities, one per label."""

    data: list[float] | list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """Probabilities of a classifier's labels, or its raw scores if those were requested."""

    probs: list[float]
    label: str  # the most likely

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[T]):
    """The answer to one prompt of a model that returns vectors.

    If the prompt could not be served, `outputs` is None and `error` has the reason.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: T | None
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None
