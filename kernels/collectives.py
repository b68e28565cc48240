"""`all_reduce`, `first_rank`: what the ranks of a tensor-parallel step tell each other.

A rank is one of `size` processes that run the same graph, each over its own part of the weights.
The graph does not say whom it talks to: whoever runs it names the group (`ranks`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmc.kernels.registry import Case, op
from llmc.kernels.torch_impl import torch_impl


class Group:
    """The ranks of one engine, over gloo or NCCL. All of them make the same calls in one order.

    RuntimeError where another rank has ended, or takes longer than the group's timeout.
    """

    def __init__(self, processes: Any) -> None:
        """`processes`: a ProcessGroupGloo or ProcessGroupNCCL of torch.distributed."""
        self._processes = processes
        self.rank: int = processes.rank()
        self.size: int = processes.size()

    def total(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, with the same bits on all of them."""
        out = x.clone(memory_format=torch.contiguous_format)
        self._processes.allreduce([out]).wait()
        return out

    def all_of(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in their order."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self.ranks]
        self._processes.allgather([parts], [x.contiguous()]).wait()
        return parts

    def of_first(self, x: Tensor) -> Tensor:
        """The `x` of rank 0."""
        out = x.clone(memory_format=torch.contiguous_format)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._processes.broadcast([out], options).wait()
        return out

    def abort(self) -> None:
        """Make the collective that is under way an error, and all later ones. From any thread."""
        self._processes.abort()

    @property
    def ranks(self) -> range:
        return range(self.size)


_running = threading.local()


@contextmanager
def ranks(group: Group | None) -> Iterator[None]:
    """Inside, this thread's collectives are among `group`; None: this process is alone."""
    before = _group()
    _running.group = group
    try:
        yield
    finally:
        _running.group = before


def _group() -> Group | None:
    group: Group | None = getattr(_running, "group", None)
    return group


@op(mutates=("turn",), shape="x")
def all_reduce(x: Tensor, turn: Tensor) -> Tensor:
    """x of any shape -> the sum of every rank's x, equal on all ranks; x itself on one alone.

    The ranks are those of `ranks(...)`, which all call it in the same order: `turn`, of any kind,
    is said to be written to, so that no compiler moves a collective before another. Summed in x's
    dtype.
    """
    group = _group()
    parts = [x] if group is None else group.all_of(x)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@op(mutates=("turn",), shape="x")
def first_rank(x: Tensor, turn: Tensor) -> Tensor:
    """x of any shape -> the x of rank 0, on every rank: what ranks must agree on to the bit.

    `turn` as for `all_reduce`.
    """
    group = _group()
    return (x if group is None else group.all_of(x)[0]).clone()


def _alone_or(call: Callable[[Group, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, turn: Tensor) -> Tensor:
        group = _group()
        return x.clone() if group is None else call(group, x)

    return run


torch_impl(all_reduce)(_alone_or(Group.total))
torch_impl(first_rank)(_alone_or(Group.of_first))


@all_reduce.cases
@first_rank.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes: tuple[Any, ...] = ((1, 1, 64), (1, 7, 33), (5,), (0, 8))
    for shape in shapes:
        turn = torch.zeros(1, device=device)
        yield torch.randn(shape, generator=gen).to(device, dtype), turn
