"""A draft model over a FakeRunner: it knows what will be drawn, and is sometimes mistaken."""

from __future__ import annotations

import random
from collections.abc import Callable

from fake_runner import VOCAB, FakeRunner, FakeStep, Row

from llmc.engine.plan import RowWork, StepPlan
from llmc.engine.spec_decode.draft_model import DraftModel
from llmc.engine.spec_decode.draft_pace import DraftCosts
from llmc.engine.spec_decode.model_speculation import ModelSpeculation
from llmc.speculative_config import SpeculativeConfig

CONFIG = SpeculativeConfig(method="draft_model", model="draft")


class UnsureRunner(FakeRunner):
    """In each step a row draws with another request's seed, with probability `error_rate`."""

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


class KnownCosts(DraftCosts):
    """Guesses are wanted from the first step on."""

    def __init__(self) -> None:
        super().__init__(frozen)
        for num_rows in range(1, 9):
            for _ in range(9):
                self.plain.add(num_rows, 1.0)

    def saw_step(self, num_rows: int, num_drafted: int, is_decode: bool) -> None:
        """Nothing changes."""


def frozen() -> float:
    """Neither steps nor guesses take any time."""
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
    step_cost: float = 0.1,
) -> tuple[ModelSpeculation, UnsureRunner]:
    """Its own rows and blocks, beside those of the engine that it is for."""
    runner = UnsureRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_in_flight=rng.choice([1, 8]),
        rng=rng,
    )
    model = DraftModel(
        runner,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_rows,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        enable_prefix_caching=caching,
    )
    speculation = ModelSpeculation(CONFIG, model, clock, step_cost)
    if is_eager:
        speculation._costs = KnownCosts()
    return speculation, runner
