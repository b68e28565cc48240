"""encode and prepare_step: a step's packed tensors equal what a slow loop over the plan writes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.kernels.prepare_step import WORK_WORDS
from llmc.kernels.prompts import Prompts
from llmc.kernels.write_segments import HEADER_WORDS, write_segments
from llmc.runner.delta import Delta, encode, work_of
from llmc.runner.rows import RowTables
from llmc.runner.step_buffers import StepBuffers, StepInputs
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
    new, work = [], []
    for row in order:
        tokens = draw(st.lists(st.integers(0, 49), min_size=1, max_size=CONTEXT))
        count = 1 if decode else draw(st.integers(1, len(tokens)))
        start = len(tokens) - 1 if decode else draw(st.integers(0, len(tokens) - count))
        blocks = [free.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
        state.tokens[row], state.blocks[row] = tokens, blocks
        new.append(
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
    plan = StepPlan(step=0, new_rows=new, work=work)
    return state, plan, draw(st.integers(0, 3))


def oracle(state: State, plan: StepPlan, padding: int) -> dict[str, list[int] | list[list[int]]]:
    """The contract of PackedStep, token by token. Padding rows get what marks them as padding."""
    token_ids, positions, slots, starts, lengths = [], [], [], [0], []
    index, row, length, tables, request_row = [], [], [], [], []
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
        request_row.append(work.row)
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
        request_row.append(state.rows.padding_row)
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
        "request_row": request_row,
    }


def prepare(state: State, plan: StepPlan, padding: int = 0) -> tuple[Delta, StepInputs]:
    """What the runner does with a plan before the step; buffers start full of another step."""
    delta = encode(state.rows, plan, padding)
    sent = torch.from_numpy(delta.words)
    write_segments.run(state.rows.memory, sent)
    buffers = StepBuffers(state.rows, max_tokens=NUM_ROWS * CONTEXT, max_requests=NUM_ROWS + 3)
    for stale in buffers.view(NUM_ROWS * CONTEXT, NUM_ROWS + 3, NUM_ROWS + 3).inputs.values():
        stale.fill_(-77)
    work = work_of(sent, delta.num_requests)
    return delta, buffers.prepare(work, delta.num_tokens, delta.num_samples)


def check(state: State, plan: StepPlan, padding: int = 0) -> StepInputs:
    delta, packed = prepare(state, plan, padding)
    want = oracle(state, plan, padding)
    tables = want.pop("block_table")
    tokens = want.pop("token_ids")
    assert packed["token_ids"][: len(tokens)].tolist() == tokens  # padding may hold any token
    assert (packed["token_ids"] >= 0).all()
    for name, values in want.items():
        assert packed[name].tolist() == values, name
    for r, blocks in enumerate(tables):
        assert packed["block_table"][r, : len(blocks)].tolist() == blocks  # type: ignore[arg-type]
    assert packed["block_table"].shape == (len(tables) + padding, state.rows.max_blocks)
    assert packed["block_table"].is_contiguous()
    assert delta.num_sampled == sum(w.sample for w in plan.work)
    int64 = ("token_ids", "positions", "slot_mapping", "logits_index", "row", "request_row")
    int32 = ("query_start", "context_len", "block_table", "length")
    assert {packed[name].dtype for name in int64} == {torch.int64}
    assert {packed[name].dtype for name in int32} == {torch.int32}
    assert len(packed["token_ids"]) == plan.num_tokens + padding
    return packed


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(states())
def test_packed_tensors_equal_the_oracle(case: tuple[State, StepPlan, int]) -> None:
    state, plan, padding = case
    check(state, plan, padding)


def test_dummies_sample_what_is_missing() -> None:
    """At their last tokens, and nothing of it is kept."""
    state, plan = _one(1, 9, RowWork(row=1, start=0, num_tokens=9, sample=True, new_blocks=(0, 1)))
    delta = encode(state.rows, plan, padding=2, num_tokens=16, num_samples=6)
    assert (delta.num_tokens, delta.num_samples, delta.num_sampled) == (16, 6, 1)
    lines = work_of(torch.from_numpy(delta.words), 3)
    pad = state.rows.padding_row
    assert lines[1:].tolist() == [[pad, 0, 3, 9, 0, 1, 3, 0], [pad, 0, 4, 12, 0, 4, 2, 0]]
    buffers = StepBuffers(state.rows, max_tokens=16, max_requests=4)
    write_segments.run(state.rows.memory, torch.from_numpy(delta.words))
    inputs = buffers.prepare(lines, 16, 6)
    assert inputs["logits_index"].tolist() == [8, 9, 10, 11, 14, 15]
    assert inputs["length"].tolist() == [9, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="7 tokens of dummies can't pad to 9 samples"):
        encode(state.rows, plan, padding=2, num_tokens=16, num_samples=9)


def _one(row: int, tokens: int, work: RowWork) -> tuple[State, StepPlan]:
    rows = RowTables(
        num_rows=NUM_ROWS,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        vocab_size=50,
        device=torch.device("cpu"),
    )
    new = NewRow(
        row=row,
        request_id="r",
        token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        sampling=SamplingParams(),
        seed=0,
        stop_token_ids=(),
    )
    state = State(rows, {row: list(range(tokens))}, {row: list(work.new_blocks)})
    return state, StepPlan(step=0, new_rows=[new], work=[work])


def test_a_chunk_in_the_middle_samples_nothing() -> None:
    work = RowWork(row=2, start=4, num_tokens=6, sample=False, new_blocks=(5, 1, 3))
    state, plan = _one(2, 12, work)
    packed = check(state, plan)
    assert len(packed["logits_index"]) == 0


def test_a_full_context() -> None:
    work = RowWork(row=0, start=0, num_tokens=CONTEXT, sample=True, new_blocks=tuple(range(6)))
    state, plan = _one(0, CONTEXT, work)
    check(state, plan)


@pytest.mark.parametrize("padding", [1, 3])
def test_padding_writes_nothing_and_reads_a_neutral_row(padding: int) -> None:
    work = RowWork(row=1, start=4, num_tokens=1, sample=True, new_blocks=(2, 0))
    state, plan = _one(1, 5, work)
    packed = check(state, plan, padding)
    assert packed["slot_mapping"][1:].tolist() == [-1] * padding
    assert packed["context_len"][1:].tolist() == [0] * padding


def test_the_delta_does_not_grow_with_the_context() -> None:
    """A decode step sends the same few words for 64 rows at 100 tokens and at 100,000."""
    sizes = []
    for context in (100, 100_000):
        rows = RowTables(
            num_rows=64,
            max_model_len=context + 1,
            block_size=16,
            vocab_size=1000,
            device=torch.device("cpu"),
        )
        work = [RowWork(row=r, start=context - 1, num_tokens=1, sample=True) for r in range(64)]
        sizes.append(encode(rows, StepPlan(step=0, work=work)).words.nbytes)
    assert sizes[0] == sizes[1] == 4 * (HEADER_WORDS + 64 * WORK_WORDS)


def test_a_new_block_costs_a_few_words() -> None:
    state, plan = _one(0, 8, RowWork(row=0, start=0, num_tokens=8, sample=True, new_blocks=(1, 2)))
    encode(state.rows, plan)
    grown = RowWork(row=0, start=8, num_tokens=1, sample=True, new_blocks=(3,))
    delta = encode(state.rows, StepPlan(step=1, work=[grown]))
    assert delta.num_segments == 1
    assert delta.words.nbytes <= 4 * (HEADER_WORDS + 8 + 4 + 1)


def test_every_part_of_a_delta_starts_on_16_bytes() -> None:
    """Kernels are compiled for aligned pointers; another alignment would be another kernel."""
    state, plan = _one(3, 7, RowWork(row=3, start=0, num_tokens=7, sample=True, new_blocks=(1, 2)))
    delta = encode(state.rows, plan)
    assert [part % 4 for part in (HEADER_WORDS, delta.picks, delta.copies)] == [0, 0, 0]
    tables = state.rows.tables.values()
    assert {table.storage_offset() * table.itemsize % 16 for table in tables} == {0}


def test_the_last_fresh_requests_of_many_tokens_are_prompts() -> None:
    rows = RowTables(
        num_rows=4, max_model_len=512, block_size=16, vocab_size=50, device=torch.device("cpu")
    )

    def plan(*spans: tuple[int, int]) -> StepPlan:
        work = [
            RowWork(row=row, start=start, num_tokens=count, sample=True)
            for row, (start, count) in enumerate(spans)
        ]
        return StepPlan(step=0, work=work)

    mixed = encode(rows, plan((40, 1), (0, 150), (0, 160)), padding=1).prompts
    assert mixed == Prompts(first_request=1, first_token=1, lengths=(150, 160))
    assert encode(rows, plan((0, 150), (40, 1))).prompts.lengths == ()
    assert encode(rows, plan((40, 1), (0, 100)), padding=2).prompts.lengths == ()
    dummy = encode(rows, StepPlan(step=-1, work=()), padding=2, num_tokens=400)
    assert dummy.prompts == dummy.long_prompts == Prompts(lengths=(200, 200))
    begun = encode(rows, plan((40, 1), (0, 150), (30, 160)), padding=1)
    assert begun.prompts.lengths == () and begun.hints()["prompts"] == begun.prompts
    assert begun.hints()["long_prompts"] == Prompts(
        first_request=1, first_token=1, lengths=(150, 160), contexts=(150, 190)
    )
