"""A graph backend for the CPU that checks that a runner meets the requirements of CUDA graphs.

A captured step is run again at every replay, into the outputs of the capture. It fails if an input
moved or was reallocated since the capture. The outputs of all other steps are lost then, as all use
one pool of memory. `forbid_host_reads` fails if the host reads anything meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmc.runner.graphs import CapturedStep, StepOutputs, StepShape

BYTES_PER_GRAPH = 1000


class MovedInput(AssertionError):
    pass


class HostRead(AssertionError):
    pass


def _address(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


class _Recorded:
    def __init__(
        self, backend: FakeGraphs, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]
    ) -> None:
        self._backend = backend
        self._run = run
        self._inputs = dict(inputs)
        self._addresses = {name: _address(t) for name, t in inputs.items()}
        self.outputs = run()
        self._output_addresses = [_address(t) for t in self.outputs]

    def replay(self) -> StepOutputs:
        self._backend.num_replays += 1
        for name, tensor in self._inputs.items():
            if _address(tensor) != self._addresses[name]:
                raise MovedInput(f"{name} moved since the step was captured")
        if [_address(t) for t in self.outputs] != self._output_addresses:
            raise MovedInput("an output was reallocated since the step was captured")
        for other in self._backend.steps:
            for lost in other.outputs if other is not self else ():
                lost.fill_(-7)
        for home, new in zip(self.outputs, self._run(), strict=True):
            home.copy_(new)
        return self.outputs


class FakeGraphs:
    """Records captures by shape, in order. Captures raise `error` if it is set."""

    def __init__(self) -> None:
        self.captured: list[StepShape] = []
        self.error: Exception | None = None
        self.num_pools = 0
        self.steps: list[_Recorded] = []
        self.num_replays = 0

    def new_pool(self) -> None:
        self.num_pools += 1

    def capture(self, run: Callable[[], StepOutputs], inputs: Mapping[str, Tensor]) -> CapturedStep:
        if self.error is not None:
            raise self.error
        shape = tuple(inputs[name].shape[0] for name in ("positions", "request_row", "row"))
        self.captured.append(StepShape(*shape))
        self.steps.append(_Recorded(self, run, inputs))
        return self.steps[-1]

    def memory_bytes(self) -> int:
        return BYTES_PER_GRAPH * len(self.captured)


# All methods by which Python reads a tensor's value: each makes the host wait for a GPU.
_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.nonzero,
    torch.nonzero,
    torch.masked_select,
    torch.equal,
}


class _NoReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise HostRead(f"{getattr(func, '__name__', func)} makes the host wait for the device")
        if (
            func is Tensor.__getitem__
            and isinstance(args[1], Tensor)
            and args[1].dtype is torch.bool
        ):
            raise HostRead("indexing by a mask makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def forbid_host_reads() -> Iterator[None]:
    with _NoReads():
        yield
