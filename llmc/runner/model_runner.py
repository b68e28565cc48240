r"""ModelRunner: executes plans and returns tokens. It owns the rows and the caches.

    plan -> delta (host) -> device -> write_segments -> prepare_step -> step -> tokens
                                      \__ or the CUDA graph of all three __/      |-> rows
                                                                                  |-> host
The next step reads the rows; the host reads the tokens when it collects the result.

`launch` never waits for the device, and `collect` waits only for its own step, so that a step can
be planned and launched while the previous one runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import EagerReason, PendingStep, StepPlan, StepResult
from llmc.errors import EngineDeadError
from llmc.kernels.collectives import ranks as ranks_of
from llmc.kernels.cpu.pages import release_memory, touch_pages
from llmc.kernels.prompts import Prompts, prompt_config
from llmc.kernels.record_tokens import record_tokens
from llmc.kernels.write_segments import HEADER_WORDS, write_segments
from llmc.runner.adapter_store import AdapterStore
from llmc.runner.buckets import Buckets, default_buckets, powers_of_2
from llmc.runner.capture_pace import CapturePace
from llmc.runner.compiles import CompileWatch
from llmc.runner.delta import LEAST_TOKENS, NO_HINTS, Delta, encode, work_of
from llmc.runner.device import Device, Download, HostDevice
from llmc.runner.faults import classified
from llmc.runner.graphs import CapturedStep, StepGraphs, StepOutputs, StepShape
from llmc.runner.images import RowImages
from llmc.runner.kv_cache import copy_blocks
from llmc.runner.logprobs import chosen_tokens, gather_logprobs, read_result, read_vectors
from llmc.runner.profiler import StepProfiler
from llmc.runner.ranks import Kind, Order, Ranks, ReceivedStep, step_order
from llmc.runner.rows import RowTables
from llmc.runner.slow_steps import SlowSteps, size_of
from llmc.runner.step_buffers import StepBuffers, StepInputs
from llmc.runner.step_recordings import StepRecordings
from llmc.runner.step_shapes import StepShapes
from llmc.runner.swap_space import SwapSpace

T = TypeVar("T")

_TOUCHED_BYTES = 512 << 20  # of the caches' first blocks, which the first requests write


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step on the device, and the download of its results, or None if it computes nothing."""

    delta: Delta
    download: Download | None


class ModelRunner:
    """Executes plans in order; implements the engine's Runner protocol.

    `swap_step` replaces the step function with one of another level, from any thread: all levels
    share rows and caches. `max_tokens` is the maximum number of tokens in a step. With
    `use_graphs`, and a device that supports graphs, a step is replayed if its shape was captured.
    Captures are made by `capture_next`, before the first request, when the engine is idle and, if
    it is never idle, now and then between two steps. On CPU, decode steps with few rows are
    recorded as they run. `pools`: the step returns vectors, not tokens.
    """

    def __init__(
        self,
        step: StepFunction,
        rows: RowTables,
        *,
        max_tokens: int,
        caches: Sequence[Tensor] = (),
        states: Sequence[Tensor] = (),
        swap_space: SwapSpace | None = None,
        adapters: AdapterStore | None = None,
        device: Device | None = None,
        buckets: Sequence[int] | None = None,
        use_graphs: bool = False,
        max_in_flight: int = 1,
        pools: bool = False,
        ranks: Ranks | None = None,
        images: RowImages | None = None,
    ) -> None:
        self.step = step
        self.rows = rows
        self.buckets = Buckets(buckets or default_buckets(rows.padding_row))
        self.max_in_flight = max_in_flight
        self.caches = tuple(caches)
        self._states = tuple(states)  # slots of rows, of padding, then snapshots
        self.swap_space = swap_space
        self._adapters = adapters
        self.images = images
        self._ranks = ranks
        self._group = None if ranks is None else ranks.group
        self._device = device or HostDevice()
        self._graphs: StepGraphs | None = None
        if use_graphs and self._device.graphs is not None:
            self._graphs = StepGraphs(self._device.graphs)
        self._recordings: StepRecordings | None = None
        if rows.device.type == "cpu" and self._graphs is None:
            self._recordings = StepRecordings()
        # a step's minimum size may require two dummies
        self._buffers = StepBuffers(
            rows,
            max_tokens=max(max_tokens, rows.padding_row) + 2,
            max_requests=rows.padding_row + 2,
            keeps_delta=(
                (self._graphs is not None or self._recordings is not None)
                and not (images and images.moves_positions)
            ),
        )
        self._untouched = touch_pages(self.caches, _TOUCHED_BYTES)
        self._tables = {name: rows.tables[name] for name in rows.tables if name in step.inputs}
        self._packed = tuple(name for name in step.inputs if name not in self._tables)
        self._hints = tuple(name for name in NO_HINTS if name in step.inputs)
        self._least = dict(LEAST_TOKENS)
        if "prompts" in self._hints and caches:
            fewest = (prompt_config(cache.shape[-1]).min_tokens for cache in caches)
            self._least["prompts"] = min(fewest)
        self._shapes = StepShapes(
            self.buckets,
            self._buffers,
            self._graphs,
            expanded_from=self._least["long_prompts"] if "long_prompts" in self._hints else None,
            max_model_len=rows.max_model_len,
        )
        self._pools = pools
        self._offered: StepFunction | None = None  # to run once its graphs are captured
        self._was_offered = False  # a step other than the first
        self._all_have_one = False  # ranks: each of them was offered a step
        self._pace = CapturePace()
        self._watch = CompileWatch()
        waits_for_others = rows.device.type != "cpu" or ranks is not None
        self._slow_steps = None if waits_for_others else SlowSteps()
        self._profiler = StepProfiler()
        self._num_unread = 0  # submitted steps whose result was not read
        self._has_failed = False  # one of them, so that no later one of them can run
        self._executor: ThreadPoolExecutor | None = None
        if rows.device.type == "cpu" and max_in_flight > 1:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="llmc-runner")

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. On a GPU its kernels are queued. On CPU it runs in another thread, or
        synchronously if only one step can be in flight."""
        self._num_unread += 1
        if self._executor is not None:
            future = self._executor.submit(self._in_order, self._launch_and_collect, plan)
            return _Pending(self, future.result)
        try:
            launched = self._in_order(self.launch, plan)
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return _Pending(self, failed.result)
        return _Pending(self, functools.partial(self.collect, launched))

    def _in_order(self, start: Callable[[StepPlan], T], plan: StepPlan) -> T:
        """`start(plan)`, unless a step before it has failed.

        That one may not have written the rows that this one reads. They would still name blocks
        that belong to other requests or to the prefix cache by now, and this step would write them.
        """
        if self._has_failed:
            raise RuntimeError("a step before this one failed")
        try:
            self._capture_under_load()
            if self._slow_steps is None:
                return start(plan)
            return self._slow_steps.run(functools.partial(start, plan), size_of(plan))
        except Exception:
            self._has_failed = True
            raise

    def on_read(self) -> None:
        """The result of a submitted step was read. Those submitted after all were read can run,
        since the engine refills the rows of failed steps and of those behind them."""
        self._num_unread -= 1
        if not self._num_unread:
            self._has_failed = False

    def start_profile(self) -> None:
        """Start recording the steps' kernels and operators with torch's profiler."""
        self._on_step_thread(self._profiler.start)

    def stop_profile(self, folder: str) -> str:
        """Write the profile into `folder`. -> the file's path, for chrome://tracing or Perfetto."""
        return self._on_step_thread(functools.partial(self._profiler.stop, folder))

    def release_caches(self) -> int:
        """Release the caches' memory to the system until the next write. -> bytes released."""
        if self.rows.device.type != "cpu" or self._ranks is not None:
            raise RuntimeError(
                "only a CPU engine with a single rank can release its caches in place; use level 2"
            )
        self._untouched = iter(())
        return release_memory((*self.caches, *self._states))

    def _on_step_thread(self, do: Callable[[], T]) -> T:
        """Run `do` in the thread that runs steps: torch profiles the thread that starts it."""
        return do() if self._executor is None else self._executor.submit(do).result()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to completion."""
        try:
            return self._launch_and_collect(plan)
        except Exception as error:
            raise self.classified(error) from error

    def classified(self, error: Exception) -> Exception:
        """`error` itself, or an EngineDeadError if no later step can succeed either."""
        if self._ranks is not None and not isinstance(error, EngineDeadError):
            why = self._ranks.why() or f"{type(error).__name__}: {error}"
            return EngineDeadError(
                f"a step of {self._ranks.size} tensor-parallel ranks failed, so they are out of "
                f"sync: {why}; restart the engine"
            )
        return classified(error)

    def _launch_and_collect(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Send the plan's delta, queue the step, and start copying its tokens to the host."""
        with torch.inference_mode(), self._watch.launching(), ranks_of(self._group):
            step = self.step  # read once: another thread may swap it
            if self.images is not None:
                self.images.follow(plan)
                if self.images.are_read(plan):
                    return self._launch_images(plan, self.images)
            shape, reason = self._shapes.choose(plan, step)
            delta, sent = self._send(plan, shape)
            if not plan.work:
                self._write_rows(delta, sent)
                return Launched(delta=delta, download=None)
            inputs, (tokens, logits) = self._compute(step, shape, delta, sent, plan, reason)
            self._save_states(delta, sent)
            return self._launched(delta, sent, inputs, tokens, logits)

    def _launch_images(self, plan: StepPlan, images: RowImages) -> Launched:
        """`launch` for a step with image tokens, which never uses a graph or a recording."""
        if self._graphs is not None:
            self._graphs.num_eager["images"] += 1
        samples = sum(work.num_samples + work.num_scored for work in plan.work)
        padding = 0 if samples else 1
        shape = StepShape(plan.num_tokens + padding, len(plan.work) + padding, samples + padding)
        delta, sent = self._send(plan, shape)
        inputs = self._prepare(delta, sent)
        given = {**inputs, **images.inputs(plan, shape.tokens, inputs["positions"])}
        given |= self.rows.tables
        tokens, logits = images.step.call(**{n: given[n] for n in images.step.inputs})
        self._save_states(delta, sent)
        self._record(inputs, tokens)
        return self._launched(delta, sent, inputs, tokens, logits)

    def _launched(
        self, delta: Delta, sent: Tensor, inputs: StepInputs, tokens: Tensor, logits: Tensor
    ) -> Launched:
        """Start copying a step's results to the host."""
        outputs = [tokens[: delta.num_sampled]]
        if self._pools:
            outputs.append(logits[: delta.num_sampled])
        elif delta.wanted:
            picks = sent[delta.picks : delta.picks + len(delta.wanted)]
            if delta.scored:
                tokens = chosen_tokens(tokens, inputs, self.rows.tables)
            outputs += gather_logprobs(logits, tokens, picks, max(delta.wanted))
        return Launched(delta=delta, download=self._device.download(outputs))

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and read its results."""
        if launched.download is None:
            return StepResult(token_ids=())
        drawn, *gathered = launched.download.wait()
        if self._pools:
            return read_vectors(launched.delta, drawn.tolist(), gathered[0])
        return read_result(launched.delta, drawn.tolist(), gathered)

    def logits(self, plan: StepPlan) -> Tensor:
        """The unprocessed logits [rows that sample, V] of a plan; the drawn tokens are dropped."""
        with torch.inference_mode(), ranks_of(self._group):
            shape, _ = self._shapes.choose(plan, self.step)
            delta, sent = self._send(plan, shape)
            _, logits = self._run(self.step, self._prepare(delta, sent))
            return logits[: delta.num_sampled].clone()

    def dummy_run(self, rows: int, tokens_each: int = 1, samples_each: int = 1) -> StepOutputs:
        """Run a step of dummies, which write to no request's cache, for its memory and kernels."""
        self._tell(Order(kind=Kind.DUMMY_RUN, numbers=(rows, tokens_each, samples_each)))
        shape = StepShape(rows * tokens_each, rows, rows * samples_each)
        with torch.inference_mode(), ranks_of(self._group):
            return self._run(self.step, self._dummies(shape))

    def follow(self, order: Order) -> None:
        """Repeat what rank 0's runner does: a step, a dummy run, a capture, swapping its step, or
        copying an adapter into a slot. Only rank 0 reads the results."""
        if order.kind == Kind.DUMMY_RUN:
            self.dummy_run(*order.numbers)
        elif order.kind == Kind.CAPTURE:
            *shape, is_next = order.numbers
            step = self._offered if is_next and self._offered is not None else self.step
            self._capture(step, StepShape(*shape))
        elif order.kind == Kind.AGREE:
            self._agree()
        elif order.kind == Kind.SWAP:
            self._end_offer(bool(order.numbers[0]))
        elif order.kind == Kind.ADAPTER:
            assert self._adapters is not None, "rank 0 has adapter slots, but this rank has none"
            with torch.inference_mode():
                self._adapters.follow(order)
        else:
            self._follow_step(ReceivedStep.of(order))

    def _follow_step(self, received: ReceivedStep) -> None:
        with torch.inference_mode(), self._watch.launching(), ranks_of(self._group):
            step, delta = self.step, received.delta
            sent = self._device.upload(delta.words, self._buffers.delta)
            if received.out_slots or received.back_slots:
                self._swap(received.out_slots, received.back_slots, sent[delta.swaps :])
            self._copy(delta, sent)
            if delta.num_requests:
                self._compute(step, received.shape, delta, sent)
                self._save_states(delta, sent)
            else:
                self._write_rows(delta, sent)

    def warm_up(self) -> None:
        """Run the shapes that kernels are selected by: powers of two of rows and tokens, all rows
        and one more, as mixed steps are padded, and the longest prompts that are not `Prompts`.
        Also three times powers of two of tokens, once in all: those of routed experts are selected
        by a multiple of all tokens of a step, which is often no power of two.

        Kernels are compiled here, once per machine, as they are cached on disk.
        """
        all_rows, totals = self.rows.padding_row, set[int]()
        for rows in sorted({*powers_of_2(all_rows), all_rows, all_rows + 1}):
            most = min(self.rows.max_model_len, self._buffers.max_tokens // rows)
            longest = (min(most, least - 1) for least in self._least.values())
            between = [3 * n for n in powers_of_2(most // 3) if 3 * n * rows not in totals]
            totals |= {rows * n for n in between}
            for tokens in sorted({*powers_of_2(most), *between, *longest}):
                self.dummy_run(rows, tokens)
        with torch.inference_mode():  # dummies change no row
            write_segments.run(self.rows.memory, self.rows.memory.new_zeros(HEADER_WORDS))
        if not self._pools:
            self._warm_up_logprobs()

    def _warm_up_logprobs(self) -> None:
        """Run what follows the steps of requests that want log-probabilities."""
        tokens, logits = self.dummy_run(1)
        with torch.inference_mode():
            gather_logprobs(logits, tokens, tokens.new_zeros(1, dtype=torch.int32), 1)

    def _dummies(self, shape: StepShape) -> StepInputs:
        """The inputs of a dummy step of this shape. Every request samples, unlike in real steps."""
        nothing = StepPlan(step=-1, work=())
        delta = encode(self.rows, nothing, shape.requests, shape.tokens, shape.samples, self._least)
        self._prepare(delta, self._device.upload(delta.words, self._buffers.delta))
        inputs = self._buffers.inputs(shape.tokens, shape.requests, shape.samples)
        return self._with_hints(inputs, delta.hints())

    # The parts of a step

    def _send(self, plan: StepPlan, shape: StepShape) -> tuple[Delta, Tensor]:
        """Encode the plan's delta, send it to the device and apply it to the caches: the rows are
        written later, by the step's graph if it has one."""
        for copy in plan.adapter_copies:
            assert self._adapters is not None, "the plan has adapters, but the runner has no slots"
            self._adapters.copy(copy.slot, copy.adapter)
        padding = shape.requests - len(plan.work)
        delta = encode(self.rows, plan, padding, shape.tokens, shape.samples, self._least)
        self._tell(step_order(plan, shape, delta) if self._ranks is not None else None)
        sent = self._device.upload(delta.words, self._buffers.delta)
        out_slots = [copy.target for copy in plan.swap_out]
        in_slots = [copy.source for copy in plan.swap_in]
        if out_slots or in_slots:
            self._swap(out_slots, in_slots, sent[delta.swaps :])
        self._copy(delta, sent)
        return delta, sent

    def _tell(self, order: Order | None) -> None:
        """On rank 0, send an order to the other ranks."""
        if self._ranks is not None and order is not None:
            self._ranks.tell(order)

    def _swap(self, out_slots: Sequence[int], in_slots: Sequence[int], blocks: Tensor) -> None:
        """Copy blocks of preempted requests to host memory, then those of resumed ones back."""
        assert self.swap_space is not None, "the plan swaps, but the runner has no swap space"
        out = len(out_slots)
        if out_slots:
            self.swap_space.swap_out(blocks[:out], out_slots)
        if in_slots:
            self.swap_space.swap_in(in_slots, blocks[out : out + len(in_slots)])

    def _write_rows(self, delta: Delta, sent: Tensor) -> None:
        if delta.num_segments:
            write_segments.run(self.rows.memory, sent)

    def _copy(self, delta: Delta, sent: Tensor) -> None:
        """Copy blocks of the caches, and snapshots to the states of new rows."""
        if delta.num_copies:
            pairs = sent[delta.copies : delta.copies + 2 * delta.num_copies].view(2, -1)
            copy_blocks(self.caches, pairs[0], pairs[1])
        if delta.num_loads:
            pairs = sent[delta.states : delta.states + 2 * delta.num_loads].view(2, -1)
            copy_blocks(self._states, pairs[0], pairs[1])

    def _save_states(self, delta: Delta, sent: Tensor) -> None:
        """Copy the rows' states after the step to snapshots."""
        if delta.num_saves:
            first = delta.states + 2 * delta.num_loads
            pairs = sent[first : first + 2 * delta.num_saves].view(2, -1)
            copy_blocks(self._states, pairs[0], pairs[1])

    def _prepare(self, delta: Delta, sent: Tensor) -> StepInputs:
        """Write the delta's changes to the rows, and the step's inputs."""
        self._write_rows(delta, sent)
        work = work_of(sent, delta.num_requests)
        inputs = self._buffers.prepare(work, delta.num_tokens, delta.num_samples)
        return self._with_hints(inputs, delta.hints())

    def _with_hints(self, inputs: StepInputs, hints: Mapping[str, Prompts]) -> StepInputs:
        return {**inputs, **{name: hints[name].words() for name in self._hints}}

    def _compute(
        self,
        step: StepFunction,
        shape: StepShape,
        delta: Delta,
        sent: Tensor,
        plan: StepPlan | None = None,
        reason: EagerReason = "not_captured",
    ) -> tuple[StepInputs, StepOutputs]:
        """Prepare the step's inputs and run it, or replay both. `plan`: on rank 0."""
        graph = self._graphs.find(step, shape, reason) if self._graphs is not None else None
        if graph is not None and self._buffers.delta is not None:
            self._buffers.keep(delta, sent)
            return self._buffers.inputs(*shape), graph.replay()
        if self._recordings is not None and self._buffers.delta is not None:
            self._buffers.keep(delta, sent)

            def run(step: StepFunction) -> StepOutputs:
                inputs = self._buffers.update_from_delta(*shape)
                return self._run(step, self._with_hints(inputs, delta.hints()))

            return self._buffers.inputs(*shape), self._recordings.run(step, shape, run)
        inputs = self._prepare(delta, sent)
        if plan is not None and self.images is not None:
            self.images.shift(plan, inputs["positions"])
        if graph is not None:
            return inputs, graph.replay()
        if self._recordings is not None:
            ready = functools.partial(self._run, inputs=inputs)
            return inputs, self._recordings.run(step, shape, ready)
        return inputs, self._run(step, inputs)

    def _run(self, step: StepFunction, inputs: StepInputs) -> StepOutputs:
        if step.uncompiled is not None and inputs["row"].shape[0] < step.min_size:
            step = step.uncompiled
        tokens, logits = step.call(**{n: inputs[n] for n in self._packed}, **self._tables)
        if not self._pools:
            self._record(inputs, tokens)
        return tokens, logits

    def _record(self, inputs: StepInputs, tokens: Tensor) -> None:
        record_tokens.run(self.rows.tables["history"], inputs["row"], inputs["length"], tokens)

    # Graphs

    def swap_step(self, step: StepFunction) -> None:
        """Run `step` from the next launch on or, if graphs are in use, once its own graphs are
        captured. Each of them is used at once."""
        if self._graphs is None or self._graphs.is_empty:
            self.step = step
        else:
            self._offered = step
        self._was_offered = True

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        """Do what would otherwise delay a step: capture one graph, or make some memory of the
        caches present, unless requests are waiting.

        -> whether there may be more to do.
        """
        self._pace.on_idle()
        if self.capture_next() is not None:
            return True
        return not has_work and next(self._untouched, False)

    def _capture_under_load(self) -> None:
        """Capture a graph before a step, if there has been no idle moment for it."""
        if self._graphs is not None and self._pace.is_due():
            with self._pace.timed(), self._watch.launching():
                self.capture_next()

    def capture_largest(self) -> StepShape | None:
        """Capture the largest step that graphs serve. It comes before all others, so that they find
        enough memory in the pool, in whatever order they come. -> its shape, if it was captured."""
        shape = self._shapes.largest if self._graphs is not None else None
        if self._graphs is None or shape is None or self._graphs.is_off(self.step):
            return None
        return shape if self._capture(self.step, shape) else None

    def capture_next(self) -> StepShape | None:
        """Capture the step, or the one that is to replace it, at a shape that has no graph yet:
        those in use first. Once no graph is missing, the step is replaced.

        -> that shape, or None if none is missing. Blocks serving for a moment.
        """
        if self._graphs is None:
            return None
        offered = self._agreed()
        step = offered or self.step
        while (shape := self._graphs.next_shape(step, self.buckets.sizes)) is not None:
            if self._capture(step, shape):
                return shape
        if offered is not None:
            # where it can't be captured, the step with graphs is faster
            can_replay = not self._graphs.is_off(offered)
            self._tell(Order(kind=Kind.SWAP, numbers=(can_replay,)))
            self._end_offer(can_replay)
        return None

    def _agreed(self) -> StepFunction | None:
        """The step to swap in. Ranks compile their own, and wait until all of them have it."""
        if self._offered is None or self._ranks is None or self._all_have_one:
            return self._offered
        self._tell(Order(kind=Kind.AGREE))
        self._agree()
        return self._offered if self._all_have_one else None

    def _agree(self) -> None:
        """Find out with the other ranks whether each has a step to swap in, or runs it already."""
        assert self._group is not None, "one rank alone needs no agreement"
        has_one = torch.tensor([int(self._was_offered)], device=self.rows.device)
        with torch.inference_mode():
            self._all_have_one = bool(torch.cat(self._group.all_of(has_one)).min())

    def _end_offer(self, can_replay: bool) -> None:
        offered, self._offered, self._all_have_one = self._offered, None, False
        if can_replay and offered is not None:
            self.step = offered
        elif self._graphs is not None:
            self._graphs.drop_next()

    def _capture(self, step: StepFunction, shape: StepShape) -> bool:
        """Capture `step` at this shape. Returns False if it can't be captured."""
        assert self._graphs is not None, "next_shape must be called before"
        is_next = step is not self.step
        self._tell(Order(kind=Kind.CAPTURE, numbers=(*shape, is_next)))
        num_runs = 0
        with torch.inference_mode(), ranks_of(self._group):
            record, inputs = self._to_capture(step, shape)

            def run() -> StepOutputs:
                nonlocal num_runs
                outputs = record()
                num_runs += 1
                return outputs

            is_captured = self._graphs.capture(step, shape, run, inputs)
        if self._ranks is not None and not num_runs:
            raise EngineDeadError(
                f"a step of {shape.tokens} tokens failed on rank {self._ranks.rank} before it was "
                "captured, so the ranks are out of sync; restart the engine"
            )
        return is_captured

    def capture_again(self, shape: StepShape) -> CapturedStep:
        """Capture the step at this shape once more, with the launch options now in use, to measure
        it. The runner goes on with the graphs it has.

        Launch a plan of this shape afterwards: it can then be replayed any number of times, which
        writes the same rows and cache slots anew. Raises what the capture raises.
        """
        if self._graphs is None or self._device.graphs is None or self._ranks is not None:
            raise RuntimeError("only a single rank that uses graphs can capture a step again")
        with torch.inference_mode():
            return self._device.graphs.capture(*self._to_capture(self.step, shape))

    def _to_capture(
        self, step: StepFunction, shape: StepShape
    ) -> tuple[Callable[[], StepOutputs], StepInputs]:
        """What a graph of `step` records, and the tensors it reads, which dummies fill."""
        inputs = self._with_hints(self._dummies(shape), NO_HINTS)

        def run() -> StepOutputs:
            if self._buffers.delta is not None:
                self._buffers.update_from_delta(*shape)
            return self._run(step, inputs)

        fixed = {} if self._buffers.delta is None else {"delta": self._buffers.delta}
        return run, {**inputs, **fixed}

    @property
    def wants_uncompiled(self) -> bool:
        """Whether a compiled step must come with the uncompiled one: to be called with fewer rows
        than it was compiled for (to match a graph, or rank 0's step), or to be recorded."""
        return self.has_graphs or self._ranks is not None or self._recordings is not None

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        """Steps that ran without a graph, by the reason; empty if the runner uses no graphs."""
        return self._graphs.num_eager if self._graphs is not None else {}

    @property
    def num_replayed_steps(self) -> int:
        """Steps on a CPU that were replayed from a recording."""
        return self._recordings.num_replays if self._recordings is not None else 0

    @property
    def num_runtime_compiles(self) -> int:
        """Compilations that a step had to wait for; 0 in a healthy engine."""
        return self._watch.num_compiles

    @property
    def graph_bytes(self) -> int:
        return self._graphs.memory_bytes if self._graphs is not None else 0


class _Pending:
    """A submitted step; `wait` returns its result or raises its error."""

    def __init__(self, runner: ModelRunner, wait: Callable[[], StepResult]) -> None:
        self._runner = runner
        self._wait = wait

    def result(self) -> StepResult:
        try:
            return self._wait()
        except Exception as error:
            raise self._runner.classified(error) from error
        finally:
            self._runner.on_read()
