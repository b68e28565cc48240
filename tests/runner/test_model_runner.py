"""ModelRunner: buckets, what a step is given and brings home, and log-probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.passes.append_sampler import PER_ROW, TABLES
from llmc.runner.model_runner import ModelRunner, default_buckets, token_logprobs
from llmc.runner.rows import RowTables
from llmc.sampling_params import SamplingParams

VOCAB = 40
PACKED = ("token_ids", "positions", "slot_mapping", "query_start", "context_len", "block_table")
SAMPLED = ("logits_index", "row", "length")


class FakeStep:
    """Draws token (newest token + 1) of each row; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.bad_rows: set[int] = set()

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(inputs)
        newest = inputs["token_ids"][inputs["logits_index"]]
        tokens = (newest + 1) % VOCAB
        for i, row in enumerate(inputs["row"].tolist()):
            if row in self.bad_rows:
                tokens[i] = -1
        logits = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(0))
        return tokens, logits


def make(buckets: tuple[int, ...] = (4, 6)) -> tuple[ModelRunner, FakeStep]:
    rows = RowTables(
        num_rows=6,
        max_model_len=16,
        block_size=4,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    fake = FakeStep()
    names = (*PACKED, *SAMPLED, *TABLES, *PER_ROW)
    step: Any = StepFunction(call=fake, inputs=names, source="")
    return ModelRunner(step, rows, buckets), fake


def enter(row: int, tokens: list[int], **params: Any) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(**params),
        seed=0,
        stop_token_ids=(),
    )


def test_default_buckets_grow_and_end_at_the_most_rows() -> None:
    for most in (1, 2, 3, 7, 64, 100, 256, 1000):
        buckets = default_buckets(most)
        assert buckets[-1] == most
        assert list(buckets) == sorted(set(buckets))
        waste = [b - a for a, b in zip(buckets, buckets[1:], strict=False)]
        assert all(w <= 64 for w in waste)


def test_a_decode_batch_is_padded_to_its_bucket() -> None:
    runner, fake = make()
    new = [enter(row, [row, 9]) for row in range(3)]
    prefill = [
        RowWork(row=r, start=0, num_tokens=2, sample=True, new_blocks=(r,)) for r in range(3)
    ]
    runner.execute(StepPlan(step=0, new_rows=new, work=prefill))
    assert len(fake.seen[0]["token_ids"]) == 6, "a prefill is not padded"
    decode = [RowWork(row=r, start=2, num_tokens=1, sample=True) for r in range(3)]
    result = runner.execute(StepPlan(step=1, work=decode))
    assert len(fake.seen[1]["token_ids"]) == 4
    assert fake.seen[1]["slot_mapping"].tolist()[3] == -1
    assert len(result.token_ids) == 3, "padding brings no token home"


def test_a_compiled_step_never_sees_a_size_below_its_least() -> None:
    """One row that decodes, and one chunk that samples nothing, both with two of everything."""
    runner, fake = make(buckets=(1, 6))
    runner.step = dataclasses.replace(runner.step, min_size=2)
    chunk = RowWork(row=0, start=0, num_tokens=3, sample=False, new_blocks=(0,))
    first = runner.execute(StepPlan(step=0, new_rows=[enter(0, [1, 2, 3, 4])], work=[chunk]))
    last = RowWork(row=0, start=3, num_tokens=1, sample=True)
    second = runner.execute(StepPlan(step=1, work=[last]))
    for seen in fake.seen:
        for name in ("token_ids", "context_len", "logits_index"):
            assert len(seen[name]) >= 2, name
        assert seen["block_table"].shape[1] >= 2
    assert first.token_ids == [] and second.token_ids == [5]


def test_a_drawn_token_is_the_next_steps_input() -> None:
    runner, fake = make()
    prefill = RowWork(row=2, start=0, num_tokens=3, sample=True, new_blocks=(0,))
    first = runner.execute(StepPlan(step=0, new_rows=[enter(2, [5, 6, 7])], work=[prefill]))
    assert first.token_ids == [8]
    second = runner.execute(
        StepPlan(step=1, work=[RowWork(row=2, start=3, num_tokens=1, sample=True)])
    )
    assert fake.seen[1]["token_ids"][0] == 8
    assert second.token_ids == [9]
    assert runner.rows.tables["history"][2, :5].tolist() == [5, 6, 7, 8, 9]


def test_results_line_up_with_the_work_that_samples() -> None:
    runner, _ = make()
    new = [enter(0, [1] * 8), enter(1, [20, 21]), enter(3, [30])]
    work = [
        RowWork(row=3, start=0, num_tokens=1, sample=True, new_blocks=(4,)),
        RowWork(row=0, start=0, num_tokens=4, sample=False, new_blocks=(0,)),
        RowWork(row=1, start=0, num_tokens=2, sample=True, new_blocks=(2,)),
    ]
    result = runner.execute(StepPlan(step=0, new_rows=new, work=work))
    assert result.token_ids == [31, 22]


def test_a_row_whose_logits_are_not_finite_gets_none() -> None:
    runner, fake = make()
    fake.bad_rows = {1}
    new = [enter(0, [1], logprobs=1), enter(1, [2], logprobs=1)]
    work = [RowWork(row=r, start=0, num_tokens=1, sample=True, new_blocks=(r,)) for r in range(2)]
    result = runner.execute(StepPlan(step=0, new_rows=new, work=work))
    assert result.token_ids == [2, None]
    assert result.logprobs[0] is not None and result.logprobs[1] is None


def test_a_plan_without_work_only_applies_its_deltas() -> None:
    runner, fake = make()
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [1], temperature=1.0)], work=()))
    result = runner.execute(StepPlan(step=1, released_rows=[0], work=()))
    assert not fake.seen and not result.token_ids
    assert float(runner.rows.tables["temperature"][0]) == 0.0


def test_a_released_row_can_be_filled_in_the_same_plan() -> None:
    runner, _ = make()
    old = RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(3,))
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [1], temperature=1.0)], work=[old]))
    new = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(5,))
    plan = StepPlan(step=1, released_rows=[0], new_rows=[enter(0, [8, 9])], work=[new])
    assert runner.execute(plan).token_ids == [10]
    assert runner.rows.block_table[0, 0] == 5 and runner.rows.num_blocks[0] == 1


# Log-probabilities


@given(st.integers(0, 2**31), st.integers(0, 20))
def test_token_logprobs_equal_log_softmax(seed: int, top: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, VOCAB, generator=generator) * 4
    ids: list[int | None] = [int(i) for i in torch.randint(0, VOCAB, (3,), generator=generator)]
    want = logits.double().log_softmax(-1)
    for row, lp in enumerate(token_logprobs(logits, ids, [top] * 3)):
        assert lp is not None and lp.token_id == ids[row]
        assert lp.logprob == pytest.approx(float(want[row, lp.token_id]), abs=1e-5)
        assert lp.rank == 1 + int((want[row] > want[row, lp.token_id]).sum())
        assert list(lp.top_token_ids) == want[row].topk(top).indices.tolist()
        assert list(lp.top_logprobs) == pytest.approx(want[row].topk(top).values.tolist(), abs=1e-5)


def test_token_logprobs_only_where_asked_and_drawn() -> None:
    logits = torch.randn(4, VOCAB)
    got = token_logprobs(logits, [1, 2, None, 3], [None, 0, 5, 2])
    assert [lp is not None for lp in got] == [False, True, False, True]
    assert got[1] is not None and got[1].top_token_ids == []
    assert got[3] is not None and len(got[3].top_token_ids) == 2
    assert token_logprobs(logits, [1, None], [None, 3]) == [None, None]


def test_more_alternatives_than_the_vocabulary_has() -> None:
    (lp,) = token_logprobs(torch.randn(1, 3), [0], [20])
    assert lp is not None and len(lp.top_token_ids) == 3
