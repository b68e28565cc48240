"""Steps captured once per shape and replayed, without host work between the kernels.

A graph is captured over the step's static buffers with dummy requests only, so capturing does not
write to any request's cache. It includes attention and the sampler. If a capture fails, the step
runs without graphs: slower, but with the same results.

All graphs of a runner use one pool of memory, which is as large as the largest of them needs: they
are replayed one after the other, and each step's results are read before the next one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import EagerReason
from llmc.garbage import without_collections

logger = logging.getLogger(__name__)

StepOutputs = tuple[Tensor, Tensor]  # next_token, logits

MAX_MIXED = 64  # graphs of steps that are not pure decodes
_MAX_SEEN = 1024  # shapes of which steps are counted
_WANTED_AFTER = 2  # steps of one shape, after which a graph for it is worth its memory


class StepShape(NamedTuple):
    """The key of a graph: its numbers of packed tokens, requests, and rows of logits."""

    tokens: int
    requests: int
    samples: int

    @classmethod
    def decode(cls, size: int) -> StepShape:
        return cls(size, size, size)

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.requests == self.samples


class CapturedStep(Protocol):
    """A step that can be replayed; its outputs are the same tensors every time. They are valid
    until another step is replayed."""

    def replay(self) -> StepOutputs: ...


class GraphBackend(Protocol):
    """How a device captures graphs. Tests capture on the CPU."""

    def new_pool(self) -> None:
        """Let later captures share no memory with earlier ones, of which none is left."""

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        """Record `run`. The addresses of its `inputs` and outputs must not change."""

    def memory_bytes(self) -> int:
        """Memory used by the captured graphs so far."""


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: StepOutputs) -> None:
        self._graph = graph
        tokens, logits = outputs
        self._outputs = unowned(tokens), unowned(logits)

    def replay(self) -> StepOutputs:
        self._graph.replay()
        return self._outputs


class _Memory:
    """Memory on a GPU, as torch.as_tensor takes it (the CUDA array interface)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def unowned(tensor: Tensor) -> Tensor:
    """A tensor over the same memory, which does not keep it allocated."""
    if not tensor.numel():
        return tensor
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Memory(tensor.data_ptr(), (last + 1) * tensor.element_size())
    found = torch.as_tensor(memory, device=tensor.device)
    if found.data_ptr() != tensor.data_ptr():
        raise RuntimeError("torch copied the memory of a CUDA graph, instead of viewing it")
    return found.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CudaGraphs:
    """torch.cuda.CUDAGraph over one memory pool and one stream.

    The outputs of a graph do not keep their memory, so that later captures use it too: the logits
    of a batch are tens of megabytes, and there are dozens of graphs. A pool must not outlive its
    graphs, because workspaces that libraries allocated during a capture may still be in it.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # a handle, whose type differs by torch version
        self._stream: torch.cuda.Stream | None = None
        self._bytes = 0

    def new_pool(self) -> None:
        self._pool = self._stream = None
        self._bytes = 0

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        stream, current = self._stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                run()  # load kernels and allocate workspaces before recording
                torch.cuda.synchronize()
                free = torch.cuda.mem_get_info()[0]
                with without_collections():  # freeing another graph would abort the capture
                    outputs = self._record(graph, run)
        finally:
            current.wait_stream(stream)
        torch.cuda.synchronize()
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return _CudaGraph(graph, outputs)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], StepOutputs]) -> StepOutputs:
        # thread_local, because another thread may be loading or compiling
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # "invalidated by a previous error"
                _stop_allocating_to(self._pool)
            raise
        graph.capture_end()
        return outputs

    def memory_bytes(self) -> int:
        return self._bytes


def _stop_allocating_to(pool: Any) -> None:
    """End what the failed end of a capture leaves under way before torch 2.12: the allocator would
    free no cached memory any more when it runs out, and `empty_cache` would fail."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # it is not under way
            end(torch.cuda.current_device(), pool)


@dataclass(slots=True, kw_only=True)
class _Graphs:
    """The graphs of one step function by shape."""

    step: StepFunction | None = None
    captured: dict[StepShape, CapturedStep] = field(default_factory=dict)
    is_off: bool = False  # a capture of a decode step failed
    only_decodes: bool = False  # a capture of another step failed


class StepGraphs:
    """The graphs of the step function that runs, and of the one that will replace it.

    A graph of the latter is used as soon as it is captured. The former are dropped when the latter
    runs for the first time.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._used = _Graphs()
        self._next = _Graphs()
        self._seen: Counter[StepShape] = Counter()
        self.num_eager: Counter[EagerReason] = Counter()  # steps that ran without a graph

    def next_shape(self, step: StepFunction, sizes: Iterable[int]) -> StepShape | None:
        """The next shape to capture: first those in use, above all those that no step function has
        a graph for; then decodes of `sizes`, largest first.

        None if nothing is missing, or if `step` can't be captured.
        """
        graphs = self._of(step)
        if graphs.is_off:
            return None
        least = 1 if step.uncompiled is not None else step.min_size
        missing = {StepShape.decode(max(size, least)) for size in sizes} - graphs.captured.keys()
        room = MAX_MIXED - sum(not shape.is_decode for shape in graphs.captured)
        has_one = self._used.captured.keys()
        by_need = sorted(self._seen.items(), key=lambda seen: (seen[0] in has_one, -seen[1]))
        for shape, times in by_need:
            is_mixed = not (shape.is_decode or shape in graphs.captured or graphs.only_decodes)
            if shape in missing or (is_mixed and room > 0 and times >= _WANTED_AFTER):
                return shape
        return max(missing, default=None)

    def capture(
        self,
        step: StepFunction,
        shape: StepShape,
        run: Callable[[], StepOutputs],
        inputs: Mapping[str, Tensor],
    ) -> bool:
        """Capture a graph. Returns False, after logging a warning, if that fails. Then there are no
        more of `step`, or none of its steps with prompts, depending on the shape."""
        graphs = self._of(step)
        if self.is_empty:
            self._backend.new_pool()
        try:
            graphs.captured[shape] = self._backend.capture(run, inputs)
        except Exception as error:
            if shape.is_decode:
                graphs.is_off = True
            else:
                graphs.only_decodes = True
            logger.warning(
                "failed to capture a CUDA graph for %d tokens and %d requests; steps without a "
                "graph launch kernels one by one, which is slower: %s: %s",
                shape.tokens, shape.requests, type(error).__name__, error,
            )  # fmt: skip
            return False
        return True

    def is_off(self, step: StepFunction) -> bool:
        """Whether `step` can't be captured."""
        return self._of(step).is_off

    def drop_next(self) -> None:
        """The step that runs will not be replaced."""
        self._next = _Graphs()

    def find(
        self, step: StepFunction, shape: StepShape, reason: EagerReason = "not_captured"
    ) -> CapturedStep | None:
        """The graph for a step that is about to run; without one, the reason is counted."""
        graph = self._graph(step, shape)
        if graph is None:
            self.num_eager[reason] += 1
        return graph

    def want(self, step: StepFunction, shape: StepShape) -> bool:
        """Count a step that could use a graph of this shape. -> whether there is one."""
        self._seen[shape] += 1
        if len(self._seen) > _MAX_SEEN:  # forget the rarest half, and of those the oldest
            by_count = sorted(self._seen.items(), key=itemgetter(1))
            self._seen = Counter(dict(by_count[len(by_count) // 2 :]))
        return self._graph(step, shape) is not None

    def _graph(self, step: StepFunction, shape: StepShape) -> CapturedStep | None:
        graphs = self._follow(step)
        graph = self._next.captured.get(shape)
        return graphs.captured.get(shape) if graph is None else graph

    def _follow(self, step: StepFunction) -> _Graphs:
        """The graphs of a step that runs."""
        if step is not self._used.step:
            self._used, self._next = self._of(step), _Graphs()
        return self._used

    def _of(self, step: StepFunction) -> _Graphs:
        for graphs in (self._used, self._next):
            if step is graphs.step:
                return graphs
        made = _Graphs(step=step, is_off=bool(step.references))
        if self._used.step is None:
            self._used = made
        else:
            self._next = made
        if step.references:
            logger.warning(
                "CUDA graphs are off: %s use their reference implementations, which read "
                "values on the host",
                ", ".join(step.references),
            )
        return made

    @property
    def is_empty(self) -> bool:
        return not (self._used.captured or self._next.captured)

    @property
    def memory_bytes(self) -> int:
        return self._backend.memory_bytes()
