"""EngineLimits and EngineFeatures: what an EngineCore is made from, besides its runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.config import SchedulingPolicy
from llmc.engine.adapters import AdapterLoader
from llmc.engine.grammar import Grammars
from llmc.engine.kv.layout import WHOLE, AttentionWindow
from llmc.engine.kv.swap import SwapRoom
from llmc.engine.spec_decode.speculation import Speculation


class RowStates(Protocol):
    """Made of users' logits processors."""

    def begin(
        self, args: Mapping[str, Any], prompt_token_ids: Sequence[int], /
    ) -> Mapping[str, bytes]:
        """NewRow.row_state of a request; raises InvalidRequestError."""


MAX_SCORED = 256  # prompt tokens of a step that are scored: each takes a row of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of the model, the block pool and a step."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # of one step
    max_model_len: int
    vocab_size: int  # the width of the model's logits
    max_num_scored_tokens: int = MAX_SCORED  # of the prompts, of one step
    max_num_queued: int | None = None  # None: no limit

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ValueError(
                "max_num_seqs and max_num_batched_tokens must be positive, "
                f"got {self.max_num_seqs} and {self.max_num_batched_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFeatures:
    """How requests are served.

    `async_scheduling` off: one step at a time, whatever the runner can do. `share_prompts` off:
    sequences of one prompt share no blocks by reference; for models with per-request state outside
    the blocks, which can have neither `swap_room` nor `speculation` either.
    """

    eos_token_ids: Sequence[int] = ()
    seed: int = 0
    async_scheduling: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    share_prompts: bool = True
    long_text_from: int | None = None  # tokens; longer texts are computed with other positions
    windows: Sequence[AttentionWindow] = (WHOLE,)  # one a group of layers (kv/layout.py)
    num_snapshots: int = 0  # of such state, for the prefix cache; without it must be off for them
    swap_room: SwapRoom | None = None  # None: preempted requests are recomputed
    speculation: Speculation | None = None
    grammars: Grammars | None = None  # None: structured outputs are refused
    adapters: AdapterLoader | None = None  # None: requests with LoRA adapters are refused
    whole_images: bool = False  # the tokens of an image attend to all of it
    whole_prompts: bool = False  # all tokens of a prompt are computed in one step
    one_prompt: bool = False  # and no other's
    row_states: RowStates | None = None  # what `extra_args` mean to users' logits processors
