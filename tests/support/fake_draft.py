"""A draft model on a FakeRunner: it knows the target's next tokens, and is sometimes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

from fake_runner import VOCAB, FakeRunner, FakeStep, Row
from oracle import AlwaysOn

from llmc.engine.options import EngineLimits
from llmc.engine.plan import RowWork, StepPlan
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.engine.spec_decode.policy import SpeculationPolicy
from llmc.speculative_config import SpeculativeConfig

CONFIG = SpeculativeConfig(method="draft_model", model="draft")


class UnsureRunner(FakeRunner):
    """In each step, a row samples with another request's seed, with probability `error_rate`."""

    knows_all_tokens = False
    error_rate = 0.2
    on_submit: Callable[[StepPlan], None] | None = None

    def submit(self, plan: StepPlan) -> FakeStep:
        if self.on_submit is not None:
            self.on_submit(plan)
        return super().submit(plan)

    def _compute(self, row: Row, work: RowWork, tokens: list[int | None]) -> None:
        seed = row.seed
        row.seed += self.rng.random() < self.error_rate
        super()._compute(row, work, tokens)
        row.seed = seed


def frozen() -> float:
    """A clock on which neither steps nor drafts take any time."""
    return 0.0


def speculate(
    rng: random.Random,
    *,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    max_rows: int,
    max_model_len: int,
    clock: Callable[[], float] = frozen,
    caching: bool = True,
    is_eager: bool = False,
    vocab_size: int = VOCAB,
    target_vocab_size: int = VOCAB,
) -> tuple[DraftModelSpeculation, UnsureRunner]:
    """Speculation with its own rows and blocks, separate from those of its engine.

    `is_eager`: it drafts from the first step on.
    """
    runner = UnsureRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_in_flight=rng.choice([1, 8]),
        rng=rng,
    )
    limits = EngineLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_rows,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    model = DraftModel(
        runner, limits, target_vocab_size=target_vocab_size, enable_prefix_caching=caching
    )
    policy = AlwaysOn(clock) if is_eager else SpeculationPolicy(clock)
    return DraftModelSpeculation(CONFIG, model, policy), runner
