"""prepare: the packed tensors of a step equal what a slow loop over the plan writes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.runner.prepare import PackedStep, prepare
from llmc.runner.rows import RowTables
from llmc.sampling_params import SamplingParams

BLOCK_SIZE, CONTEXT, NUM_ROWS = 4, 24, 5


@dataclass(slots=True)
class State:
    """Rows as a plan left them, in plain Python."""

    rows: RowTables
    tokens: dict[int, list[int]] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)


@st.composite
def states(draw: st.DrawFn) -> tuple[State, StepPlan, int]:
    """Rows with random histories and shuffled blocks, a plan over them, and a number of dummies."""
    rows = RowTables(
        num_rows=NUM_ROWS,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        vocab_size=50,
        device=torch.device("cpu"),
    )
    state = State(rows)
    order = draw(st.permutations(range(NUM_ROWS)))[: draw(st.integers(1, NUM_ROWS))]
    free = draw(st.permutations(range(NUM_ROWS * CONTEXT // BLOCK_SIZE)))
    decode = draw(st.booleans())
    work = []
    for row in order:
        tokens = draw(st.lists(st.integers(0, 49), min_size=1, max_size=CONTEXT))
        count = 1 if decode else draw(st.integers(1, len(tokens)))
        start = len(tokens) - 1 if decode else draw(st.integers(0, len(tokens) - count))
        blocks = [free.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
        state.tokens[row], state.blocks[row] = tokens, blocks
        rows.fill(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                sampling=SamplingParams(),
                seed=0,
                stop_token_ids=(),
            )
        )
        work.append(
            RowWork(
                row=row,
                start=start,
                num_tokens=count,
                sample=decode or start + count == len(tokens),
                new_blocks=blocks,
            )
        )
    rows.append_blocks(work)
    plan = StepPlan(step=0, work=work)
    return state, plan, draw(st.integers(0, 3))


def oracle(state: State, plan: StepPlan, padding: int) -> dict[str, list[int] | list[list[int]]]:
    """The contract of PackedStep, token by token. Padding rows get what marks them as padding."""
    token_ids, positions, slots, starts, lengths = [], [], [], [0], []
    index, row, length, tables = [], [], [], []
    for work in plan.work:
        for position in range(work.start, work.start + work.num_tokens):
            token_ids.append(state.tokens[work.row][position])
            positions.append(position)
            block = state.blocks[work.row][position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(token_ids))
        end = work.start + work.num_tokens
        lengths.append(end)
        tables.append(state.blocks[work.row][: -(-end // BLOCK_SIZE)])
        if work.sample:
            index.append(len(token_ids) - 1)
            row.append(work.row)
            length.append(end)
    for _ in range(padding):
        positions.append(0)
        slots.append(-1)
        lengths.append(0)
        starts.append(starts[-1] + 1)
        index.append(starts[-1] - 1)
        row.append(state.rows.padding_row)
        length.append(0)
    return {
        "token_ids": token_ids,
        "positions": positions,
        "slot_mapping": slots,
        "query_start": starts,
        "context_len": lengths,
        "logits_index": index,
        "row": row,
        "length": length,
        "block_table": tables,
    }


def check(packed: PackedStep, state: State, plan: StepPlan, padding: int = 0) -> None:
    want = oracle(state, plan, padding)
    tables = want.pop("block_table")
    tokens = want.pop("token_ids")
    assert packed.token_ids[: len(tokens)].tolist() == tokens  # padding may hold any token
    for name, values in want.items():
        assert getattr(packed, name).tolist() == values, name
    for r, blocks in enumerate(tables):
        assert packed.block_table[r, : len(blocks)].tolist() == blocks  # type: ignore[arg-type]
    assert packed.block_table.shape == (len(tables) + padding, max(len(b) for b in tables))  # type: ignore[arg-type]
    assert packed.num_sampled == sum(w.sample for w in plan.work)
    int64 = ("token_ids", "positions", "slot_mapping", "logits_index", "row")
    int32 = ("query_start", "context_len", "block_table", "length")
    assert {getattr(packed, name).dtype for name in int64} == {torch.int64}
    assert {getattr(packed, name).dtype for name in int32} == {torch.int32}
    assert len(packed.token_ids) == plan.num_tokens + padding


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(states())
def test_packed_tensors_equal_the_oracle(case: tuple[State, StepPlan, int]) -> None:
    state, plan, padding = case
    check(prepare(state.rows, plan, padding), state, plan, padding)


def _one(row: int, tokens: int, work: RowWork) -> tuple[State, StepPlan]:
    rows = RowTables(
        num_rows=NUM_ROWS,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        vocab_size=50,
        device=torch.device("cpu"),
    )
    rows.fill(
        NewRow(
            row=row,
            request_id="r",
            token_ids=list(range(tokens)),
            num_prompt_tokens=tokens,
            sampling=SamplingParams(),
            seed=0,
            stop_token_ids=(),
        )
    )
    rows.append_blocks([work])
    state = State(rows, {row: list(range(tokens))}, {row: list(work.new_blocks)})
    return state, StepPlan(step=0, work=[work])


def test_a_chunk_in_the_middle_samples_nothing() -> None:
    work = RowWork(row=2, start=4, num_tokens=6, sample=False, new_blocks=(5, 1, 3))
    state, plan = _one(2, 12, work)
    packed = prepare(state.rows, plan)
    check(packed, state, plan)
    assert packed.num_sampled == 0 and len(packed.logits_index) == 0


def test_a_full_context() -> None:
    work = RowWork(row=0, start=0, num_tokens=CONTEXT, sample=True, new_blocks=tuple(range(6)))
    state, plan = _one(0, CONTEXT, work)
    check(prepare(state.rows, plan), state, plan)


@pytest.mark.parametrize("padding", [1, 3])
def test_padding_writes_nothing_and_reads_a_neutral_row(padding: int) -> None:
    work = RowWork(row=1, start=4, num_tokens=1, sample=True, new_blocks=(2, 0))
    state, plan = _one(1, 5, work)
    packed = prepare(state.rows, plan, padding)
    check(packed, state, plan, padding)
    assert packed.slot_mapping[1:].tolist() == [-1] * padding
    assert packed.context_len[1:].tolist() == [0] * padding


def test_the_block_table_is_as_wide_as_a_compiled_step_wants() -> None:
    work = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(3,))
    state, plan = _one(0, 2, work)
    assert prepare(state.rows, plan).block_table.tolist() == [[3]]
    assert prepare(state.rows, plan, min_blocks=2).block_table.shape == (1, 2)
