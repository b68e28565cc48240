"""Decode graphs: what is captured when, static addresses, no host reads, the same tokens.

They run on the CPU against a backend that records and replays there (support/fake_graphs.py).
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
from fake_graphs import BYTES_PER_GRAPH, FakeGraphs, HostRead, MovedInput, forbid_host_reads
from op_cases import require_cpu_ops

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.kernels import tuned
from llmc.kernels.prompts import PromptConfig, Prompts, prompt_config
from llmc.passes import pipeline
from llmc.passes.split_prompts import split_prompts
from llmc.runner import graphs
from llmc.runner.device import HostDevice
from llmc.runner.graphs import MAX_MIXED, CudaGraphs, StepGraphs, StepShape
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


@pytest.fixture(scope="module")
def naming_prompts(tmp_path_factory: pytest.TempPathFactory) -> tiny_engine.Running:
    """With the pass `split_prompts`, which otherwise serves GPUs alone."""
    require_cpu_ops()
    path = tiny_models.save_checkpoint("llama", tmp_path_factory.mktemp("prompts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "split_prompts", lambda **_: split_prompts())
        return tiny_engine.start(path, dtype="bfloat16")


def graphed(running: tiny_engine.Running, **options: Any) -> tuple[ModelRunner, FakeGraphs]:
    """A runner over the same step, rows and caches, whose decode steps are recorded."""
    backend = FakeGraphs()
    plain = running.started.runner
    runner = ModelRunner(
        plain.step,
        plain.rows,
        max_tokens=256,
        use_graphs=True,
        **{"buckets": BUCKETS, "device": HostDevice(backend), **options},
    )
    return runner, backend


def offered(running: tiny_engine.Running, **fields: Any) -> tuple[ModelRunner, FakeGraphs]:
    """The same after its first step and all captures, with another step to swap in."""
    runner, backend = graphed(running)
    runner.execute(enter(0))
    while runner.capture_next():
        pass
    runner.swap_step(dataclasses.replace(runner.step, level=1, **fields))
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


def sizes(*decodes: int) -> list[StepShape]:
    return [StepShape.decode(size) for size in decodes]


def test_graphs_are_captured_when_idle_those_in_use_first(running: tiny_engine.Running) -> None:
    runner, backend = graphed(running)
    runner.execute(enter(0))
    for step in range(3):
        runner.execute(decode(range(1), 3 + step))
    assert backend.captured == [], "a stream of answers waits for no capture"
    assert runner.eager_steps == {"not_captured": 4}
    while runner.use_idle_time():
        pass
    assert backend.captured == sizes(1, 4, 2)
    assert runner.graph_bytes == 3 * BYTES_PER_GRAPH
    runner.execute(decode(range(1), 6))
    assert backend.num_replays == 1 and sum(runner.eager_steps.values()) == 4


def test_steps_with_prompts_run_as_graphs_of_the_shapes_that_came(
    running: tiny_engine.Running,
) -> None:
    """A prompt of 13 tokens beside a decode is padded to 16 tokens; draft tokens likewise."""
    runner, backend = graphed(running)
    plain = running.started.runner

    def mixed(row: int) -> StepPlan:
        entering = enter(row, num_tokens=13)
        work = [RowWork(row=0, start=3, num_tokens=1, sample=True), *entering.work]
        return StepPlan(step=0, new_rows=entering.new_rows, work=work)

    for one in (runner, plain):
        one.execute(enter(0))
    want = [plain.execute(mixed(row)).token_ids for row in (1, 2, 1)]
    got = [runner.execute(mixed(1)).token_ids, runner.execute(mixed(2)).token_ids]
    while runner.use_idle_time():
        pass
    assert backend.captured[0] == StepShape(tokens=16, requests=4, samples=4)
    assert backend.num_replays == 0
    got.append(runner.execute(mixed(1)).token_ids)
    assert backend.num_replays == 1
    assert got == want


def test_draft_tokens_of_any_number_run_as_a_few_graphs(running: tiny_engine.Running) -> None:
    """Each of three rows has up to four; some step has a prompt that ends in a later one."""
    runner, backend = graphed(running)
    plain = running.started.runner

    def verify(*drafts: int) -> StepPlan:
        return StepPlan(
            step=0,
            work=[
                RowWork(
                    row=row, start=3, num_tokens=1 + count, sample=True,
                    draft_token_ids=tuple(range(7, 7 + count)),
                )
                for row, count in enumerate(drafts)
            ],
        )  # fmt: skip

    def unfinished(row: int, drafts: int) -> StepPlan:
        entering = enter(row, num_tokens=9)
        work = [*verify(drafts).work, dataclasses.replace(entering.work[0], sample=False)]
        return StepPlan(step=0, new_rows=entering.new_rows, work=work)

    plans = [verify(*drafts) for drafts in itertools.product(range(1, 5), (0, 2, 4), (1, 3))]
    plans += [unfinished(3, 0)]
    for one in (runner, plain):
        for row in range(3):
            one.execute(enter(row))
    want = [plain.execute(plan).token_ids for plan in plans]
    for _ in range(2):
        assert [runner.execute(plan).token_ids for plan in plans] == want
    while runner.use_idle_time():
        pass
    mixed = [shape for shape in backend.captured if not shape.is_decode]
    assert sorted(mixed) == [(8, 2, 2), (8, 4, 8), (16, 4, 4), (16, 4, 16)]
    before = backend.num_replays
    assert [runner.execute(plan).token_ids for plan in plans] == want
    assert backend.num_replays - before == len(plans)


def test_a_step_that_no_graph_can_serve_is_counted_by_its_reason(
    running: tiny_engine.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = graphed(running)
    while runner.use_idle_time():
        pass
    for row in range(5):
        runner.execute(enter(row))  # a graph is captured when the engine is idle again
    assert runner.eager_steps == {"not_captured": 5}
    runner.execute(decode(range(5), 3))  # the largest bucket is 4
    monkeypatch.setattr("llmc.runner.buckets.MAX_MIXED_TOKENS", 8)
    runner.execute(enter(5, num_tokens=9))
    assert runner.eager_steps == {"not_captured": 5, "too_large": 2}
    assert sum(runner.eager_steps.values()) == 7 and running.started.runner.eager_steps == {}


def test_prompts_run_in_graphs_and_before_a_capture_in_their_kernel(
    naming_prompts: tiny_engine.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a graph, prompts from 14 tokens on go to the kernel that is faster, as was measured
    for one of the caches' head sizes."""
    measured = {
        prompt_config.key((dim,), prompt_config.rule(dim)): PromptConfig(min_tokens=tokens)
        for dim, tokens in ((8, 14), (16, 200))
    }
    monkeypatch.setattr(tuned, "load_table", lambda: measured)
    caches = [torch.zeros(1, 1, 16, dim) for dim in (16, 8)]
    runner, backend = graphed(naming_prompts, caches=caches)
    call, named = runner.step.call, set()

    def kept(**inputs: torch.Tensor) -> Any:
        named.add(Prompts.read(inputs["prompts"]).lengths)
        return call(**inputs)

    runner.step = dataclasses.replace(runner.step, call=kept)
    for tokens in (13, 14, 20):
        runner.dummy_run(1, tokens)
    assert named == {(), (14,), (20,)}
    named.clear()
    plain = naming_prompts.started.runner
    lengths = (13, 14, 16)
    want = {n: plain.execute(enter(0, num_tokens=n)).token_ids for n in lengths}
    for times in range(4):
        for n in lengths:
            assert runner.execute(enter(0, num_tokens=n)).token_ids == want[n]
        if times == 0:
            assert named == {(), (14,), (16,)}
        while runner.use_idle_time():
            pass
    assert [shape for shape in backend.captured if not shape.is_decode] == [
        StepShape(tokens=16, requests=2, samples=2),
        StepShape(tokens=16, requests=1, samples=1),  # of 16 tokens, without a dummy
    ]
    # the first graph is captured once two of its steps have run, the other a turn later
    assert runner.eager_steps == {"not_captured": 4}
    assert backend.num_replays == 4 * len(lengths) - 4
    assert named == {(), (14,), (16,)}


def test_a_failed_capture_costs_speed_and_no_answer(
    running: tiny_engine.Running, caplog: pytest.LogCaptureFixture
) -> None:
    runner, backend = graphed(running)
    runner.execute(enter(0))
    assert runner.capture_next() == StepShape.decode(4)
    backend.error = RuntimeError("operation not permitted when stream is capturing")
    while runner.use_idle_time():
        pass
    assert runner.capture_next() is None
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "not permitted when stream is capturing" in warnings[0]
    plain = running.started.runner
    want = plain.execute(decode(range(1), 3)).token_ids
    assert runner.execute(decode(range(1), 3)).token_ids == want
    backend.error = None
    runner.swap_step(dataclasses.replace(runner.step, level=1))
    assert runner.use_idle_time(), "another step function is tried anew"


def test_a_step_with_references_is_never_captured(
    running: tiny_engine.Running, caplog: pytest.LogCaptureFixture
) -> None:
    runner, backend = graphed(running)
    runner.swap_step(dataclasses.replace(runner.step, references=("paged_attention",)))
    assert runner.capture_next() is None and backend.captured == []
    assert "paged_attention" in caplog.text


def test_one_request_needs_no_padding_where_the_plain_step_takes_it(
    running: tiny_engine.Running,
) -> None:
    """Compiled steps take two rows at least; a batch of one runs the plain step instead."""
    runner, backend = graphed(running)

    def refuse(**inputs: Any) -> Any:
        raise AssertionError("the compiled step got one row")

    two_rows = dataclasses.replace(
        runner.step, level=2, min_size=2, call=refuse, uncompiled=runner.step
    )
    runner.execute(enter(0))
    runner.swap_step(two_rows)
    want = running.started.runner.execute(decode(range(1), 3)).token_ids
    assert runner.execute(decode(range(1), 3)).token_ids == want
    assert runner.capture_next() == StepShape.decode(1)
    assert runner.execute(decode(range(1), 3)).token_ids == want
    assert backend.num_replays == 1


class ScriptedCuda:
    """As much of torch.cuda as a capture uses, with the calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "serving"
        outer = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                outer.calls.append(f"begin {pool} on {outer.current}")

            def capture_end(self) -> None:
                outer.calls.append("end")

        class Stream:
            def __init__(self) -> None:
                outer.num_streams += 1
                self.name = f"stream {outer.num_streams}"

            def wait_stream(self, other: object) -> None: ...

        @contextmanager
        def stream(new: Stream) -> Iterator[None]:
            before, outer.current = outer.current, new.name
            try:
                yield
            finally:
                outer.current = before

        self.num_streams = self.num_pools = 0
        serving = Stream()
        self.num_streams = 0
        for name, value in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "stream": stream,
            "current_stream": lambda: serving,
            "synchronize": lambda: None,
            "mem_get_info": lambda: (1000, 2000),
            "graph_pool_handle": self._pool,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "as_tensor", self._as_tensor)

    @staticmethod
    def _as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        given = memory.__cuda_array_interface__
        assert given["typestr"] == "|u1" and given["strides"] is None
        found = (ctypes.c_uint8 * given["shape"][0]).from_address(given["data"][0])
        return torch.frombuffer(found, dtype=torch.uint8)

    def _pool(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"


def test_a_failed_capture_is_ended_and_gives_the_stream_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = ScriptedCuda(monkeypatch)
    graphs = CudaGraphs()
    runs = iter([None, RuntimeError("out of memory")])

    def run() -> Any:
        if (error := next(runs)) is not None:
            raise error
        return torch.zeros(1), torch.zeros(1)

    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.capture(run, {})
    assert cuda.calls == ["begin pool 1 on stream 1", "end"]
    assert cuda.current == "serving"


@pytest.mark.parametrize("is_under_way", [True, False])  # torch before 2.12, and later
def test_a_capture_that_cannot_be_ended_does_not_stay_under_way(
    monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    cuda = ScriptedCuda(monkeypatch)

    def fail(graph: Any) -> None:
        raise RuntimeError("invalidated by a previous error")

    def end_allocations(device: int, pool: str) -> None:
        cuda.calls.append(f"end allocations to {pool} on device {device}")
        if not is_under_way:
            raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocations, raising=False)
    runs = iter([(torch.zeros(1), torch.zeros(1))])
    with pytest.raises(StopIteration):  # what the step raised, not what followed
        CudaGraphs().capture(lambda: next(runs), {})
    assert cuda.calls == [
        "begin pool 1 on stream 1", "end allocations to pool 1 on device 3"
    ]  # fmt: skip
    assert cuda.current == "serving"


def test_a_pool_is_not_used_again_once_its_graphs_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From another thread too: stream and pool belong to the runner, not to the thread."""
    cuda = ScriptedCuda(monkeypatch)
    graphs = CudaGraphs()
    outputs = torch.zeros(1), torch.zeros(1)
    graphs.capture(lambda: outputs, {})
    graphs.capture(lambda: outputs, {})
    graphs.new_pool()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(graphs.capture, lambda: outputs, {}).result().replay is not None
    begun = [call for call in cuda.calls if call.startswith("begin")]
    assert begun == [
        "begin pool 1 on stream 1",
        "begin pool 1 on stream 1",
        "begin pool 2 on stream 2",
    ]


@pytest.mark.parametrize("used", [4, 3])  # a vocabulary that is padded
def test_the_outputs_of_a_graph_leave_their_memory_to_other_graphs(
    used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 graphs of 65 rows of logits over 128,000 tokens would keep a gigabyte otherwise."""
    ScriptedCuda(monkeypatch)
    memory = torch.arange(12, dtype=torch.bfloat16)
    kept = []

    def run() -> Any:
        logits = memory.view(3, 4)[:, :used]
        kept.append(weakref.ref(logits))
        return torch.zeros(3), logits

    graph = CudaGraphs().capture(run, {})
    assert [logits() for logits in kept] == [None, None]
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: memory.neg_(), raising=False)
    _, logits = graph.replay()
    assert logits.data_ptr() == memory.data_ptr()
    assert logits.tolist() == memory.view(3, 4)[:, :used].tolist() and logits[2, 1] == -9


def test_garbage_is_not_collected_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ScriptedCuda(monkeypatch)
    enabled = []

    def run() -> Any:
        enabled.append(gc.isenabled())
        return torch.zeros(1), torch.zeros(1)

    CudaGraphs().capture(run, {})
    assert enabled == [True, False] and gc.isenabled()


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


def test_a_swapped_step_is_captured_anew_when_idle(running: tiny_engine.Running) -> None:
    runner, backend = offered(running, min_size=2)
    first = runner.execute(decode(range(1), 3))
    assert runner.step.level == 0 and backend.num_replays == 1, "graphs serve until it is idle"
    while runner.use_idle_time():
        pass
    assert runner.step.level == 1 and backend.num_pools == 1
    assert backend.captured == sizes(4, 2, 1, 4, 2), "1 is below the new step's least size"
    assert runner.execute(decode(range(1), 3)).token_ids == first.token_ids
    assert backend.num_replays == 2


def test_graphs_serve_until_the_swapped_step_has_all_of_its_own(
    running: tiny_engine.Running,
) -> None:
    """Requests that come while they are captured would run without graphs otherwise."""
    runner, backend = offered(running)
    for replays, level in enumerate((0, 0, 0, 1), 1):
        runner.use_idle_time()
        assert runner.step.level == level
        runner.execute(decode(range(1), 2 + replays))
        assert backend.num_replays == replays and sum(runner.eager_steps.values()) == 1


def test_a_swapped_step_that_cannot_be_captured_does_not_replace_graphs(
    running: tiny_engine.Running, caplog: pytest.LogCaptureFixture
) -> None:
    runner, backend = offered(running)
    assert runner.use_idle_time()
    backend.error = RuntimeError("out of memory")
    while runner.use_idle_time():
        pass
    assert runner.step.level == 0 and "out of memory" in caplog.text
    runner.execute(decode(range(1), 3))
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


def test_a_step_captured_again_replays_the_last_plan_and_the_runner_keeps_its_graph(
    running: tiny_engine.Running,
) -> None:
    """As often as it takes to time it: the rows and the caches stay the same."""
    runner, backend = graphed(running)
    for row in range(2):
        runner.execute(enter(row))
    while runner.capture_next():
        pass
    again = runner.capture_again(StepShape.decode(2))
    want = runner.execute(decode(range(2), 3)).token_ids
    changed = (runner.rows.memory, *running.caches)
    before = [tensor.clone().nan_to_num() for tensor in changed]
    for _ in range(3):
        with torch.inference_mode():
            tokens, _ = again.replay()
        assert tokens.tolist() == list(want)
    assert all(map(torch.equal, before, [tensor.nan_to_num() for tensor in changed]))
    backend.steps[-1].replay = None  # type: ignore[assignment, method-assign]
    backend.error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="stream is capturing"):
        runner.capture_again(StepShape.decode(2))
    num_replays = backend.num_replays
    assert len(runner.execute(decode(range(2), 4)).token_ids) == 2
    assert backend.num_replays == num_replays + 1
    with pytest.raises(RuntimeError, match="uses graphs"):
        running.started.runner.capture_again(StepShape.decode(2))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_text_is_the_same_with_graphs_and_with_steps_in_flight(
    running: tiny_engine.Running, max_in_flight: int
) -> None:
    """Requests of several lengths come and go, so every bucket is used."""
    want = tiny_engine.generate(running.engine(), PROMPTS, 12)
    runner, backend = graphed(running, max_in_flight=max_in_flight)
    engine = running.engine(max_num_seqs=4, runner=runner)
    while runner.use_idle_time():
        pass
    got = tiny_engine.generate(engine, PROMPTS, 12)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert backend.num_replays > 10


class Growing(FakeGraphs):
    """Memory as a GPU has it: the largest step's, then what each graph is itself."""

    def memory_bytes(self) -> int:
        return sum((50_000, 3000, 1000)[: len(self.captured)])


def test_the_largest_graph_comes_first_and_all_that_may_come_are_counted(
    running: tiny_engine.Running,
) -> None:
    """Smaller ones that came before it would leave it nothing that it can use."""
    backend = Growing()
    runner, _ = graphed(running, device=HostDevice(backend))
    rows = runner.rows.padding_row
    assert graphs_to_come(runner) == 54_000 + (len(BUCKETS) + MAX_MIXED - 2) * 1000
    assert backend.captured == [StepShape(256, rows + 1, rows + 1), *sizes(4, 2)]
    assert graphs_to_come(running.started.runner) == 0


def test_a_step_with_prompts_that_cannot_be_captured_leaves_decodes_their_graphs(
    running: tiny_engine.Running, caplog: pytest.LogCaptureFixture
) -> None:
    runner, backend = graphed(running)
    backend.error = RuntimeError("out of memory")
    assert runner.capture_largest() is None and "out of memory" in caplog.text
    backend.error = None
    for _ in range(3):
        runner.execute(enter(0, num_tokens=13))
    while runner.use_idle_time():
        pass
    assert backend.captured == sizes(4, 2, 1), "another attempt would fail again"
    runner.swap_step(dataclasses.replace(runner.step, level=1))
    while runner.use_idle_time():
        pass
    assert runner.step.level == 1
    assert backend.captured[3:] == [StepShape(16, 2, 2), *sizes(4, 2, 1)]


def test_of_many_shapes_the_frequent_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps have any number of shapes, and each would be kept and sorted forever."""
    monkeypatch.setattr(graphs, "_MAX_SEEN", 8)
    step: Any = SimpleNamespace(references=(), uncompiled=None, min_size=1)
    seen = StepGraphs(FakeGraphs())
    frequent, rare = StepShape(100, 3, 3), StepShape(200, 3, 3)
    for shape in (frequent, frequent, frequent, rare):
        seen.want(step, shape)
    for tokens in range(300, 350):
        seen.want(step, StepShape(tokens, 3, 3))
    seen.want(step, rare)
    assert seen.next_shape(step, ()) == frequent
    seen.capture(step, frequent, lambda: (torch.zeros(1), torch.zeros(1)), {})
    assert seen.next_shape(step, ()) is None, "the first time that the rare one came is forgotten"
