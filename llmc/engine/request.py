"""Request: one sequence while the engine has it. The scheduler alone changes it.

Three counts say how far it is. `token_ids` are the tokens that the host has seen. `num_tokens`
adds those that steps in flight will draw. `num_computed` is how many of them have been handed to
the runner; a step is planned for what lies between the last two.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from llmc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmc.engine.beam_search import Beam
    from llmc.engine.grammar import Matcher
    from llmc.engine.parallel_sampling import SamplingGroup
    from llmc.engine.plan import TokenLogprobs
    from llmc.engine.spec_decode.speculation import Drafter


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, at the front, with the tokens it has
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, what has been generated, and the row and blocks that it holds.

    A request holds a row exactly when it holds blocks, and may do so for a step or two after it
    finished or was preempted: until no step in flight (`num_in_flight`) uses them.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output; the end by length
    eos_token_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()  # these and the end tokens: all that end it
    cache_salt: bytes = b""
    priority: int = 0
    arrival: int = -1  # set by the scheduler; lower came earlier
    rank: tuple[int, int] = (0, -1)  # set by the scheduler; lower is served first

    state: RequestState = RequestState.WAITING
    row: int | None = None
    blocks: list[int] = field(default_factory=list)  # see RowTable
    num_dropped: list[int] = field(default_factory=list)  # first blocks of each group, given back
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0  # planned steps whose result has not come
    num_guessed: int = 0  # tokens in flight that stand only if they are drawn; in no count above
    capacity: int = 0  # tokens that `blocks` hold
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as needed
    num_published: int = 0  # leading blocks that are in the prefix cache, or have a twin there
    num_cached_tokens: int = 0  # of the prompt, when first scheduled
    arrived_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None  # from then to its first step; None until that
    host_slots: list[int] = field(default_factory=list)  # of its blocks, while it is swapped out
    num_saved: int = 0  # tokens that these hold
    group: SamplingGroup | None = None  # others of the same prompt, to share its blocks with
    drafter: Drafter | None = None  # guesses its tokens; None: nobody does
    needs_known_token: bool = (
        False  # what may follow a token is known only when the token is: one of these
    )
    matcher: Matcher | None = None  # of its structured output; has seen the tokens of token_ids
    row_state: Mapping[str, bytes] = field(default_factory=dict)  # see plan.NewRow
    beam: Beam | None = None  # of a search, which chooses its tokens
    mask: bytes | None = None  # of its next draw, where it has a matcher
    scores: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt, see below

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)
        if self.sampling.prompt_logprobs is not None:
            self.scores = [None] * (self.num_prompt_tokens - 1)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        """Log-probabilities of the prompt are asked for, and some are not known.

        `scores[i]` is that of token i + 1, which comes when token i is computed. The prompt is
        computed in order, so the last one is there when all are.
        """
        return bool(self.scores) and self.scores[-1] is None

    @property
    def awaits_token(self) -> bool:
        """It is led by a token that is in flight or, in a beam search, has yet to be chosen."""
        return self.needs_known_token and self.num_tokens > len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED
