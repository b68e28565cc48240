"""Decode graphs: what is captured when, static addresses, no host reads, the same tokens.

They run on the CPU against a backend that records and replays there (support/fake_graphs.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tiny_engine
import tiny_models
from fake_graphs import BYTES_PER_GRAPH, FakeGraphs, HostRead, MovedInput, forbid_host_reads
from op_cases import require_cpu_ops

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.runner.device import HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams
from llmc.startup.profile import graphs_to_come

BUCKETS = (1, 2, 4)
PROMPTS = tiny_models.prompts((5, 3, 9, 1, 6))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> tiny_engine.Running:
    require_cpu_ops()  # the references read tensors on the host
    path = tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("model"))
    return tiny_engine.start(path)


def graphed(running: tiny_engine.Running, **options: Any) -> tuple[ModelRunner, FakeGraphs]:
    """A runner over the same step, rows and caches, whose decode steps are recorded."""
    backend = FakeGraphs()
    plain = running.started.runner
    runner = ModelRunner(
        plain.step,
        plain.rows,
        max_tokens=256,
        device=HostDevice(backend),
        use_graphs=True,
        **{"buckets": BUCKETS, **options},
    )
    return runner, backend


def enter(row: int, num_tokens: int = 3, **params: Any) -> StepPlan:
    """A prefill of one request in blocks of its own."""
    new = NewRow(
        row=row,
        request_id=str(row),
        token_ids=list(range(1, num_tokens + 1)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(**{"temperature": 0.0, **params}),
        seed=row,
        stop_token_ids=(),
    )
    blocks = range(row * 4, row * 4 + 4)
    work = RowWork(row=row, start=0, num_tokens=num_tokens, sample=True, new_blocks=tuple(blocks))
    return StepPlan(step=0, new_rows=[new], work=[work])


def decode(rows: range, start: int) -> StepPlan:
    work = [RowWork(row=r, start=start, num_tokens=1, sample=True) for r in rows]
    return StepPlan(step=0, work=work)


def test_sizes_are_captured_largest_first_once_the_first_answer_is_out(
    running: tiny_engine.Running,
) -> None:
    runner, backend = graphed(running)
    runner.execute(enter(0))
    assert backend.captured == []
    for step in range(4):
        runner.execute(decode(range(1), 3 + step))
    assert backend.captured == [4, 2, 1]
    assert runner.graph_bytes == 3 * BYTES_PER_GRAPH
    # the third decode found its graph just made, the fourth too
    assert backend.num_replays == 2


def test_a_batch_is_padded_to_the_captured_size_above_it(running: tiny_engine.Running) -> None:
    runner, backend = graphed(running)
    for row in range(3):
        runner.execute(enter(row))
    while runner.capture_next():
        pass
    plain = running.started.runner
    want = [plain.execute(decode(range(3), 3)).token_ids]
    got = [runner.execute(decode(range(3), 3)).token_ids]
    assert got == want and len(got[0]) == 3
    assert backend.num_replays == 1


def test_an_exchanged_step_is_captured_anew(running: tiny_engine.Running) -> None:
    runner, backend = graphed(running)
    runner.execute(enter(0))
    while runner.capture_next():
        pass
    runner.step = dataclasses.replace(runner.step, level=1, min_size=2)
    first = runner.execute(decode(range(1), 3))
    assert backend.num_replays == 0, "a graph of the old step was replayed"
    while runner.capture_next():
        pass
    assert backend.captured == [4, 2, 1, 4, 2], "1 is below the new step's least size"
    assert runner.execute(decode(range(1), 3)).token_ids == first.token_ids
    assert backend.num_replays == 1


def test_nothing_moves_and_the_host_reads_nothing_between_replays(
    running: tiny_engine.Running,
) -> None:
    """Launching a steady step, with log-probabilities and all, never waits for the device."""
    runner, backend = graphed(running)
    for row in range(2):
        runner.execute(enter(row, logprobs=3, temperature=0.8))
    while runner.capture_next():
        pass
    launched = []
    with forbid_host_reads():
        launched += [runner.launch(decode(range(2), 3 + step)) for step in range(9)]
    results = [runner.collect(step) for step in launched]
    assert backend.num_replays == 9
    assert all(len(r.token_ids) == 2 and r.logprobs[0] is not None for r in results)


def test_the_guards_of_this_test_do_catch(running: tiny_engine.Running) -> None:
    runner, backend = graphed(running, buckets=(1,))
    runner.execute(enter(0))
    runner.capture_next()
    with forbid_host_reads(), pytest.raises(HostRead):
        int(runner.rows.tables["history"][0, 0])
    (recorded,) = backend.steps
    recorded._inputs["row"] = recorded._inputs["row"].clone()
    with pytest.raises(MovedInput, match="row moved"):
        runner.execute(decode(range(1), 3))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_text_is_the_same_with_graphs_and_with_steps_in_flight(
    running: tiny_engine.Running, max_in_flight: int
) -> None:
    """Requests of several lengths come and go, so every bucket is used."""
    want = tiny_engine.generate(running.engine(), PROMPTS, 12)
    runner, backend = graphed(running, max_in_flight=max_in_flight)
    engine = running.engine(max_num_seqs=4, runner=runner)
    got = tiny_engine.generate(engine, PROMPTS, 12)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert backend.num_replays > 10


def test_what_graphs_will_take_is_measured_on_two_of_them(running: tiny_engine.Running) -> None:
    runner, backend = graphed(running)
    assert graphs_to_come(runner) == 3 * BYTES_PER_GRAPH
    assert backend.captured == [4, 2]
    assert graphs_to_come(running.started.runner) == 0
