"""Request: one sequence while the engine has it. The scheduler alone changes it.

Three counts say how far it is. `token_ids` are the tokens that the host has seen. `num_tokens`
adds those that steps in flight will draw. `num_computed` is how many of them have been handed to
the runner; a step is planned for what lies between the last two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from llmc.sampling_params import SamplingParams


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
    arrival: int = -1  # set by the scheduler; lower came earlier

    state: RequestState = RequestState.WAITING
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0  # planned steps whose result has not come
    capacity: int = 0  # tokens that `blocks` hold
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as needed
    num_published: int = 0  # leading blocks that are in the prefix cache, or have a twin there
    num_cached_tokens: int = 0  # of the prompt, when first scheduled
    was_scheduled: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED
