"""ModelRunner: buckets, what a step is given and brings home, and log-probabilities."""

from __future__ import annotations

import dataclasses
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import BlockCopy, NewRow, RowWork, StepPlan, StepResult
from llmc.kernels.step_inputs import PREPARED, ROW_TABLES
from llmc.runner.logprobs import gather_logprobs
from llmc.runner.model_runner import ModelRunner
from llmc.runner.rows import RowTables
from llmc.runner.slow_steps import SlowSteps
from llmc.runner.swap_space import SwapSpace, piece_sizes
from llmc.sampling_params import SamplingParams

VOCAB = 40


class FakeStep:
    """Draws token (newest token + 1) of each row; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.bad_rows: set[int] = set()
        self.vocab = VOCAB

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        newest = inputs["token_ids"][inputs["logits_index"]]
        tokens = (newest + 1) % self.vocab
        for i, row in enumerate(inputs["row"].tolist()):
            if row in self.bad_rows:
                tokens[i] = -1
        logits = torch.randn(len(tokens), self.vocab, generator=torch.Generator().manual_seed(0))
        return tokens, logits


def make(**options: Any) -> tuple[ModelRunner, FakeStep]:
    rows = RowTables(
        num_rows=6,
        max_model_len=16,
        block_size=4,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    fake = FakeStep()
    names = (*PREPARED, *ROW_TABLES)
    step: Any = StepFunction(call=fake, inputs=names, source="")
    return ModelRunner(step, rows, max_tokens=32, **options), fake


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


@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["this thread", "another thread"])
def test_steps_are_timed(max_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = list[int]()

    def run(self: SlowSteps, step: Any, size: Any) -> Any:
        timed.append(threading.get_ident())
        return step()

    monkeypatch.setattr(SlowSteps, "run", run)
    runner, _ = make(max_in_flight=max_in_flight)
    work = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(0,))
    plan = StepPlan(step=0, new_rows=(enter(0, [3, 4]),), work=(work,))
    assert list(runner.submit(plan).result().token_ids) == [5]
    assert len(timed) == 1 and (timed[0] == threading.get_ident()) == (max_in_flight == 1)


@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["this thread", "another thread"])
def test_a_profile_shows_the_steps(max_in_flight: int, tmp_path: Path) -> None:
    runner, _ = make(max_in_flight=max_in_flight)
    with pytest.raises(RuntimeError, match="start one first"):
        runner.stop_profile(str(tmp_path))
    runner.start_profile()
    with pytest.raises(RuntimeError, match="already"):
        runner.start_profile()
    work = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(0,))
    runner.submit(StepPlan(step=0, new_rows=[enter(0, [1, 2])], work=[work])).result()
    path = runner.stop_profile(str(tmp_path / "new"))
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::clone" for event in events)  # of the fake step


def test_a_compiled_step_never_sees_a_size_below_its_least() -> None:
    """One row that decodes, and one chunk that samples nothing, both with two of everything."""
    runner, fake = make()
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


def test_a_token_is_drawn_after_each_draft() -> None:
    """Guesses 9 and 3 behind token 8: the first is what the step draws, the second is not."""
    runner, fake = make()
    prefill = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(0, 1))
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [6, 7], logprobs=0)], work=[prefill]))
    verify = RowWork(row=0, start=2, num_tokens=3, sample=True, draft_token_ids=(9, 3))
    result = runner.execute(StepPlan(step=1, work=[verify]))
    assert fake.seen[1]["token_ids"].tolist() == [8, 9, 3]
    assert fake.seen[1]["length"].tolist() == [3, 4, 5]
    assert result.token_ids == [9, 10, 4] and len(result.logprobs) == 3


def test_a_warm_up_runs_every_shape_and_leaves_the_rows_alone() -> None:
    runner, fake = make()
    before = runner.rows.memory.clone()
    runner.warm_up()
    shapes = {(len(seen["context_len"]), len(seen["token_ids"])) for seen in fake.seen}
    by_twos = {(r, r * t) for r in (1, 2, 4, 6, 7) for t in (1, 2, 4, 8, 16) if r * t <= 34}
    by_threes = {(1, 3), (1, 6), (1, 12), (2, 24), (6, 18), (7, 21)}  # each number of tokens once
    assert shapes == by_twos | by_threes | {(6, 30)}  # and all the tokens that fit
    assert all((seen["slot_mapping"] == -1).all() for seen in fake.seen)
    assert torch.equal(runner.rows.memory, before)


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
    result = runner.execute(StepPlan(step=0, new_rows=[enter(0, [1], temperature=0.5)], work=()))
    assert not fake.seen and not result.token_ids
    assert float(runner.rows.tables["temperature"][0]) == 0.5


def test_blocks_are_copied_before_the_step_runs() -> None:
    caches = [torch.arange(24.0).view(4, 1, 3, 2), torch.arange(12.0).view(4, 1, 3, 1).bfloat16()]
    before = [cache.clone() for cache in caches]
    runner, _ = make(caches=caches)
    work = RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(3,))
    copies = [BlockCopy(source=1, target=3), BlockCopy(source=0, target=2)]
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [1])], work=[work], block_copies=copies))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 0, 1]])


def test_states_are_copied_to_rows_before_a_step_and_to_snapshots_after_it() -> None:
    """Six rows and padding, then two snapshots; the step adds 100 to what its rows have."""
    states = [torch.arange(9.0).view(9, 1).repeat(1, 3), torch.arange(9.0).view(9, 1).bfloat16()]
    runner, fake = make(states=states)
    step = fake.__call__

    def add(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        for state in states:
            state[inputs["row"]] += 100
        return step(**inputs)

    runner.step = dataclasses.replace(runner.step, call=add)
    new = dataclasses.replace(enter(2, [1, 2, 3, 4, 5]), snapshot=1)
    work = [
        RowWork(row=2, start=4, num_tokens=1, sample=True, new_blocks=(0, 1), snapshot=0),
        RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(2,), snapshot=1),
    ]
    runner.execute(StepPlan(step=0, new_rows=[new, enter(0, [1])], work=work))
    for state in states:
        assert state[:, 0].tolist() == [100, 1, 108, 3, 4, 5, 6, 108, 100]


def test_blocks_go_to_host_memory_and_come_back_elsewhere() -> None:
    caches = [torch.randn(4, 1, 3, 2), torch.randn(4, 2, 3, 4).to(torch.float8_e4m3fn)]
    before = [cache.view(torch.uint8).clone() for cache in caches]
    runner, _ = make(caches=caches, swap_space=SwapSpace(caches, 3))
    out = [BlockCopy(source=2, target=0), BlockCopy(source=0, target=2)]
    runner.execute(StepPlan(step=0, work=(), swap_out=out))
    for cache in caches:
        cache.view(torch.uint8).fill_(7)
    back = [BlockCopy(source=0, target=1), BlockCopy(source=2, target=3)]
    runner.execute(StepPlan(step=1, work=(), swap_in=back))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.uint8)[[1, 3]], old[[2, 0]])
        assert (cache.view(torch.uint8)[[0, 2]] == 7).all()


def test_what_leaves_a_block_is_safe_from_what_enters_it_in_the_same_plan() -> None:
    caches = [torch.arange(8.0).view(4, 1, 2, 1)]
    runner, _ = make(caches=caches, swap_space=SwapSpace(caches, 2))
    runner.execute(StepPlan(step=0, work=(), swap_out=[BlockCopy(source=3, target=1)]))
    runner.execute(
        StepPlan(
            step=1,
            work=(),
            swap_out=[BlockCopy(source=0, target=0)],
            swap_in=[BlockCopy(source=1, target=0)],
            block_copies=[BlockCopy(source=0, target=2)],
        )
    )
    assert caches[0][[0, 2]].flatten().tolist() == [6.0, 7.0, 6.0, 7.0]
    runner.execute(StepPlan(step=2, work=(), swap_in=[BlockCopy(source=0, target=3)]))
    assert caches[0][3].flatten().tolist() == [0.0, 1.0]


def test_the_speed_of_copies_is_measured() -> None:
    caches = [torch.zeros(8, 2, 16, 8)]
    assert 0 < SwapSpace(caches, 4).measure() < 1e13  # a machine may be busy


@pytest.mark.parametrize("block_bytes", [3000, 1 << 21, 7 << 18, 3 << 30])
@pytest.mark.parametrize("num_slots", [1, 5, 1000, 9999])
def test_pinned_memory_is_not_rounded_up_by_much(num_slots: int, block_bytes: int) -> None:
    sizes = list(piece_sizes(num_slots, block_bytes))
    assert sum(sizes) == num_slots
    taken = sum(1 << (count * block_bytes - 1).bit_length() for count in sizes)
    if block_bytes < 1 << 30:  # a larger block is a piece of its own
        assert taken <= num_slots * block_bytes + len(sizes) * block_bytes
        assert len(sizes) <= num_slots * block_bytes / 2**30 * 1.1 + 60


def test_steps_in_flight_read_what_the_step_before_drew() -> None:
    """Three steps are submitted before any result is read."""
    runner, fake = make(max_in_flight=3)
    prefill = RowWork(row=1, start=0, num_tokens=2, sample=True, new_blocks=(0,))
    plans = [StepPlan(step=0, new_rows=[enter(1, [5, 6])], work=[prefill])]
    for step in (1, 2):
        work = RowWork(row=1, start=1 + step, num_tokens=1, sample=True)
        plans.append(StepPlan(step=step, work=[work]))
    pending = [runner.submit(plan) for plan in plans]
    assert [p.result().token_ids for p in pending] == [[7], [8], [9]]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_error_of_a_step_comes_with_its_result(max_in_flight: int) -> None:
    runner, fake = make(max_in_flight=max_in_flight)
    too_long = RowWork(row=0, start=0, num_tokens=99, sample=False, new_blocks=(0,))
    pending = runner.submit(StepPlan(step=0, new_rows=[enter(0, [1] * 9)], work=[too_long]))
    with pytest.raises(ValueError, match="row 0 with 99 tokens is outside the 6 rows of 16 tokens"):
        pending.result()
    good = RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(0,))
    after = runner.submit(StepPlan(step=1, new_rows=[enter(0, [1])], work=[good]))
    assert after.result().token_ids == [2]


@pytest.mark.parametrize("max_in_flight", [1, 2], ids=["this thread", "another thread"])
def test_a_step_after_one_that_failed_does_not_run_over_rows_that_were_not_written(
    max_in_flight: int,
) -> None:
    """The failed step was to fill row 0, which still names blocks that others may own by now."""
    runner, fake = make(max_in_flight=max_in_flight)
    prefill = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(1,))
    runner.submit(StepPlan(step=0, new_rows=[enter(0, [6, 7])], work=[prefill])).result()
    refill = dataclasses.replace(prefill, new_blocks=(2,))
    no_swap_space = [BlockCopy(source=0, target=0)]
    failing = StepPlan(step=1, new_rows=[enter(0, [8, 9])], work=[refill], swap_out=no_swap_space)
    decode = RowWork(row=0, start=2, num_tokens=1, sample=True)
    first, second = runner.submit(failing), runner.submit(StepPlan(step=2, work=[decode]))
    with pytest.raises(AssertionError, match="no swap space"):
        first.result()
    with pytest.raises(RuntimeError, match="a step before this one failed"):
        second.result()
    assert len(fake.seen) == 1
    again = StepPlan(step=3, new_rows=[enter(0, [8, 9])], work=[refill])
    assert runner.submit(again).result().token_ids == [10]


def test_a_token_that_could_not_be_drawn_is_no_index() -> None:
    """A step already planned on top of it must read a token that exists."""
    runner, fake = make()
    fake.bad_rows = {0}
    work = RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(0,))
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [1])], work=[work]))
    runner.execute(StepPlan(step=1, work=[RowWork(row=0, start=1, num_tokens=1, sample=True)]))
    assert fake.seen[1]["token_ids"].tolist() == [0]


def test_a_released_row_can_be_filled_in_the_same_plan() -> None:
    runner, _ = make()
    old = RowWork(row=0, start=0, num_tokens=1, sample=True, new_blocks=(3,))
    runner.execute(StepPlan(step=0, new_rows=[enter(0, [1], temperature=1.0)], work=[old]))
    new = RowWork(row=0, start=0, num_tokens=2, sample=True, new_blocks=(5,))
    plan = StepPlan(step=1, released_rows=[0], new_rows=[enter(0, [8, 9])], work=[new])
    assert runner.execute(plan).token_ids == [10]
    assert runner.rows.block_table[0, 0] == 5 and runner.rows.num_blocks[0] == 1


# Log-probabilities


def draw_once(runner: ModelRunner, wanted: list[int | None], **params: Any) -> StepResult:
    """One prefill of a request for each of `wanted` alternatives."""
    new, work = [], []
    for row, most in enumerate(wanted):
        new.append(enter(row, [5 + row, 6], logprobs=most, **params))
        work.append(RowWork(row=row, start=0, num_tokens=2, sample=True, new_blocks=(row,)))
    return runner.execute(StepPlan(step=0, new_rows=new, work=work))


def test_logprobs_are_those_of_the_picked_samples() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    tokens, picks = torch.tensor([4, 9, 30]), torch.tensor([2, 0], dtype=torch.int32)
    chosen, values, ranks, top_ids, top_values = gather_logprobs(logits, tokens, picks, 5)
    want = logits.double().log_softmax(-1)[[2, 0]]
    assert chosen.tolist() == [30, 4]
    own = want.gather(-1, chosen[:, None])
    torch.testing.assert_close(values.double(), own[:, 0], atol=1e-5, rtol=0)
    assert ranks.tolist() == (1 + (want > own).sum(-1)).tolist()
    assert top_ids.tolist() == want.topk(5).indices.tolist()
    torch.testing.assert_close(top_values.double(), want.topk(5).values, atol=1e-5, rtol=0)


def test_logprobs_only_where_asked_and_drawn() -> None:
    runner, fake = make()
    fake.bad_rows = {2}
    result = draw_once(runner, [None, 0, 5, 2])
    assert result.token_ids == [7, 7, None, 7]
    assert [lp is not None for lp in result.logprobs] == [False, True, False, True]
    assert result.logprobs[1] is not None and result.logprobs[1].top_token_ids == []
    assert result.logprobs[3] is not None and len(result.logprobs[3].top_token_ids) == 2


def test_more_alternatives_than_the_vocabulary_has() -> None:
    runner, fake = make()
    fake.vocab = 3
    (logprob,) = draw_once(runner, [20]).logprobs
    assert logprob is not None and len(logprob.top_token_ids) == len(logprob.top_logprobs) == 3


def test_a_prompt_is_scored_chunk_by_chunk() -> None:
    """Each token but the first gets a log-probability; nothing in the rows is overwritten."""
    runner, fake = make()
    prompt = [3, 1, 4, 1, 5, 9, 2]
    new = [enter(1, prompt, prompt_logprobs=2, logprobs=1)]
    first = RowWork(row=1, start=0, num_tokens=4, sample=False, new_blocks=(0, 1), is_scored=True)
    last = RowWork(row=1, start=4, num_tokens=3, sample=True, is_scored=True)
    results = [
        runner.execute(StepPlan(step=0, new_rows=new, work=[first])),
        runner.execute(StepPlan(step=1, work=[last])),
    ]
    assert [list(r.token_ids) for r in results] == [[], [3]]
    scores = [score for r in results for score in r.scores]
    assert [score.token_id for score in scores] == prompt[1:]
    assert all(len(score.top_token_ids) == 2 for score in scores)
    assert results[1].logprobs[0] is not None and results[1].logprobs[0].token_id == 3
    assert runner.rows.tables["history"][1, :8].tolist() == [*prompt, 3]
    want = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    got = [score.logprob for score in results[0].scores]
    assert got == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(4)], abs=1e-5)
