"""Decode steps captured once per batch size and replayed: no host work between the kernels.

A graph is captured over the step's static buffers with every request a dummy, so capturing
touches no request's cache; attention and the sampler are inside. The largest batch comes first and
the others share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from llmc.compiler.lower import StepFunction

StepOutputs = tuple[Tensor, Tensor]  # next_token, logits


class CapturedStep(Protocol):
    """A step that can be run again; its outputs are the same tensors every time."""

    def replay(self) -> StepOutputs: ...


class GraphBackend(Protocol):
    """How a device records what it runs. Tests record on the CPU."""

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        """Record `run`, which reads `inputs` and returns its outputs, none of which may move."""

    def memory_bytes(self) -> int:
        """What the captured graphs hold so far."""


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: StepOutputs) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> StepOutputs:
        self._graph.replay()
        return self._outputs


class CudaGraphs:
    """torch.cuda.graph with one memory pool for all."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle, whose type differs by torch version
        self._bytes = 0

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are loaded and workspaces made before recording
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: another thread may be loading or compiling
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        torch.cuda.synchronize()
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return _CudaGraph(graph, outputs)

    def memory_bytes(self) -> int:
        return self._bytes


class DecodeGraphs:
    """The graphs of the step that runs, by batch size. Those of a replaced step are dropped."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._step: StepFunction | None = None
        self._captured: dict[int, CapturedStep] = {}

    def next_size(self, step: StepFunction, sizes: Iterable[int]) -> int | None:
        """The largest of `sizes` that has no graph of this step; None when all have one."""
        if step is not self._step:
            self._step = step
            self._captured = {}
        needed = {max(size, step.min_size) for size in sizes}
        return max(needed - self._captured.keys(), default=None)

    def capture(
        self,
        step: StepFunction,
        size: int,
        run: Callable[[], StepOutputs],
        inputs: Mapping[str, Tensor],
    ) -> None:
        assert step is self._step, "ask for the next size first"
        self._captured[size] = self._backend.capture(run, inputs)

    def find(self, step: StepFunction, size: int) -> CapturedStep | None:
        return self._captured.get(size) if step is self._step else None

    @property
    def memory_bytes(self) -> int:
        return self._backend.memory_bytes()
