"""EngineLimits and EngineFeatures: the configuration of an EngineCore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmc.config import SchedulingPolicy
from llmc.engine.adapters import AdapterLoader
from llmc.engine.grammar import Grammars
from llmc.engine.kv.layout import WHOLE, AttentionWindow
from llmc.engine.kv.swap import SwapConfig
from llmc.engine.spec_decode.speculation import Speculation


class RowStates(Protocol):
    """Validates requests for users' logits processors."""

    def begin(
        self, args: Mapping[str, Any], prompt_token_ids: Sequence[int], /
    ) -> Mapping[str, bytes]:
        """The NewRow.row_state of a request. Raises InvalidRequestError."""


MAX_SCORED = 256  # scored prompt tokens per step: each needs a row of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of the model, the block pool and a step."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # per step
    max_model_len: int
    vocab_size: int  # the width of the model's logits
    max_num_scored_tokens: int = MAX_SCORED  # prompt tokens per step
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

    Without `async_scheduling`, one step runs at a time even if the runner supports more. Without
    `share_prompts`, sequences of one prompt share no blocks by reference. It must be off for models
    with per-request state outside the blocks, which also lack `swap_config` and `speculation`.
    """

    eos_token_ids: Sequence[int] = ()
    seed: int = 0
    async_scheduling: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    share_prompts: bool = True
    long_context_from: int | None = None  # tokens; longer sequences are computed at other positions
    windows: Sequence[AttentionWindow] = (WHOLE,)  # one per group of layers (kv/layout.py)
    num_snapshots: int = 0  # of state outside the blocks; 0: such models can't use prefix caching
    swap_config: SwapConfig | None = None  # None: preempted requests are recomputed
    speculation: Speculation | None = None
    grammars: Grammars | None = None  # None: structured outputs are refused
    adapters: AdapterLoader | None = None  # None: requests with LoRA adapters are refused
    whole_images: bool = False  # an image's tokens attend to all of the image
    whole_prompts: bool = False  # all tokens of a prompt are computed in one step
    one_prompt: bool = False  # a step computes the tokens of one prompt only
    row_states: RowStates | None = None  # interprets `extra_args` for users' logits processors
