"""What a draft head's runner is told: its tokens, its blocks and the target's beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from oracle import AlwaysOn

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.row_table import RowTable
from llmc.engine.options import EngineLimits
from llmc.engine.plan import EagerReason, RowWork, StepPlan, StepResult
from llmc.engine.request import Request, RequestState
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.engine.spec_decode.draft_sequence import DraftSequence
from llmc.image_input import ImageInput
from llmc.pooling import DRAFTED
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig

SIZE = 4
VOCAB = 50


class Recorder:
    """Draws 40, 41, ... and keeps what its rows were told, as a real runner does."""

    max_in_flight = 1
    num_runtime_compiles = 0
    eager_steps: Mapping[EagerReason, int] = MappingProxyType({})

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.blocks: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_drawn = 0

    def submit(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        for new in plan.new_rows:
            self.tokens[new.row], self.blocks[new.row] = list(new.token_ids), []
        drawn: list[int | None] = []
        for work in plan.work:
            self._take(work)
            if work.sample:
                drawn.append(DRAFTED + 40 + self.num_drawn % 8)
                self.tokens[work.row][work.start + work.num_tokens :] = drawn[-1:]
                self.num_drawn += 1

        class Done:
            def result(self) -> StepResult:
                return StepResult(token_ids=drawn)

        return Done()

    def _take(self, work: RowWork) -> None:
        blocks = self.blocks[work.row]
        if work.new_blocks:
            blocks[len(blocks) if work.kept_blocks is None else work.kept_blocks :] = (
                work.new_blocks
            )
        if work.entered_token_ids:
            end = work.start + work.num_tokens
            self.tokens[work.row][end - len(work.entered_token_ids) : end] = work.entered_token_ids


class Target:
    """One request as the target's engine has it, in blocks that lie elsewhere than the head's."""

    def __init__(self, prompt: Sequence[int], **fields: Any) -> None:
        pool = BlockPool(64, SIZE, False)
        for _ in range(17):
            pool.allocate()
        self.rows = RowTable(2, pool)
        self.request = Request(
            request_id="a",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(),
            seed=3,
            max_total_tokens=60,
            **fields,
        )
        self.admit()

    def admit(self) -> None:
        assert self.rows.allocate(self.request, 0)
        self.request.state = RequestState.RUNNING
        self.request.num_computed = self.request.num_tokens

    def drawn(self, *tokens: int) -> None:
        """Tokens came, and all but the last of them are computed."""
        self.request.token_ids += tokens
        self.request.num_tokens = len(self.request.token_ids)
        self.request.num_computed = self.request.num_tokens - 1
        while self.request.table.capacity < self.request.num_tokens:
            self.rows.grow(self.request)

    def preempt(self) -> None:
        self.rows.free(self.request)
        self.rows.pool.allocate()  # others are at work
        self.admit()


class Pair:
    def __init__(self, prompt: Sequence[int], *, caching: bool = False, **fields: Any) -> None:
        self.target, self.runner = Target(prompt, **fields), Recorder()
        limits = EngineLimits(
            num_blocks=32,
            block_size=SIZE,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=64,
            vocab_size=VOCAB,
        )
        runner: Any = self.runner
        self.model = DraftModel(
            runner,
            limits,
            target_vocab_size=VOCAB,
            is_head=True,
            enable_prefix_caching=caching,
        )
        config = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=3)
        self.speculation = DraftModelSpeculation(config, self.model, AlwaysOn())
        sequence = self.speculation.drafter(self.target.request)
        assert isinstance(sequence, DraftSequence)
        self.target.request.extension = self.sequence = sequence

    def draft(self) -> list[int]:
        self.runner.plans.clear()
        self.speculation.begin_step([self.target.request])
        assert self.speculation.num_failures == 0
        self.check_row()
        return list(self.sequence.propose(self.target.request, 8))

    def check_row(self) -> None:
        """Each of its blocks has the target's beside it, where that has one."""
        row = self.sequence.request.row
        assert row is not None
        blocks = self.runner.blocks[row]
        own, theirs = blocks[::2], blocks[1::2]
        assert own == self.sequence.request.table.blocks
        assert len(set(own)) == len(own)
        wanted = self.target.request.table.blocks[: len(own)]
        assert theirs == wanted + [0] * (len(own) - len(wanted))

    @property
    def computed(self) -> list[tuple[int, int]]:
        return [(w.start, w.num_tokens) for plan in self.runner.plans for w in plan.work]


def test_a_place_has_the_token_behind_and_drafts_are_computed_again() -> None:
    pair = Pair([1, 2, 3, 4, 5])
    pair.target.drawn(6)
    assert pair.draft() == [40, 41, 42]
    assert pair.computed == [(0, 5), (5, 1), (6, 1)]
    assert pair.runner.plans[0].new_rows[0].token_ids == (2, 3, 4, 5, 6)
    row = pair.sequence.request.row
    assert row is not None
    assert pair.runner.tokens[row][:8] == [2, 3, 4, 5, 6, *(DRAFTED + t for t in (40, 41, 42))]
    pair.target.drawn(40, 41, 9)  # two of them are accepted
    assert pair.draft() == [43, 44, 45]
    assert pair.computed == [(5, 3), (8, 1), (9, 1)]
    assert pair.runner.tokens[row][:8] == [2, 3, 4, 5, 6, 40, 41, 9]


def test_blocks_of_the_target_that_come_later_or_change() -> None:
    """A draft may run ahead into blocks that the target does not have yet."""
    pair = Pair([1, 2, 3])
    pair.target.drawn(4)
    assert len(pair.target.request.table.blocks) == 1
    pair.draft()
    assert len(pair.sequence.request.table.blocks) == 2
    for token in range(5, 14):
        pair.target.drawn(token)
        pair.draft()
    before = pair.target.request.table.blocks[:]
    pair.target.preempt()
    assert pair.target.request.table.blocks != before
    pair.target.drawn(14)
    pair.draft()
    assert pair.computed[0] == (12, 1)  # what it has computed stays


def test_the_prompt_is_caught_up_with_in_chunks() -> None:
    pair = Pair(list(range(1, 41)))
    pair.target.drawn(41)
    assert pair.draft() == []
    assert pair.computed == [(0, 16)]
    assert pair.draft() == [40, 41, 42]  # the rest is near
    assert pair.computed == [(16, 16), (32, 8), (40, 1), (41, 1)]


def test_a_prompt_of_one_token() -> None:
    pair = Pair([1])
    pair.speculation.begin_step([pair.target.request])
    assert not pair.runner.plans and not pair.sequence.tokens
    pair.target.drawn(2)
    assert pair.draft() == [40, 41, 42]
    assert pair.computed == [(0, 1), (1, 1), (2, 1)]


IMAGE = ImageInput(digest=b"one", spans=((1, 2),), tensors={})


@pytest.mark.parametrize(
    "prompt, fields, cached",
    [
        (range(1, 14), {}, 12),
        ((9, *range(2, 14)), {}, 0),  # what the head reads of the others depends on the first
        (range(1, 14), {"cache_salt": b"other"}, 0),
        (range(1, 14), {"images": (IMAGE,)}, 0),
    ],
    ids=["same", "another first token", "another salt", "an image"],
)
def test_its_own_prefix_cache(prompt: Sequence[int], fields: Any, cached: int) -> None:
    pair = Pair(list(range(1, 14)), caching=True)
    pair.target.drawn(14)
    while not pair.draft():
        pass
    other = Target(list(prompt), **fields)
    other.drawn(14)
    sequence = pair.speculation.drafter(other.request)
    assert isinstance(sequence, DraftSequence)
    other.request.extension = sequence
    pair.runner.plans.clear()
    pair.speculation.begin_step([other.request])
    assert pair.computed[0][0] == cached
