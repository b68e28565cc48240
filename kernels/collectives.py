"""`all_reduce`, `all_gather`, `first_rank`: the collectives of a tensor-parallel step.
`embed_shard`, `shard_ids`: ops whose results depend on the rank.

A rank is one of `size` processes that run the same graph, each over its own part of the weights.
The graph does not name the group: the caller sets it with `ranks`.
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
    """The ranks of one engine, over gloo or NCCL. All ranks make the same calls in the same order.

    Calls raise RuntimeError if another rank has exited or exceeds the group's timeout.
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
        """Make the running collective and all later ones fail. Can be called from any thread."""
        abort = getattr(self._processes, "abort", None)
        if abort is not None:  # missing in older gloo, which detects the exit of a rank by itself
            abort()

    @property
    def ranks(self) -> range:
        return range(self.size)


_running = threading.local()


@contextmanager
def ranks(group: Group | None) -> Iterator[None]:
    """Run this thread's collectives in `group` within this context; None: a single process."""
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
    """x of any shape -> the sum of every rank's x, equal on all ranks; x itself without a group.

    All ranks in `ranks(...)` call it in the same order. `turn`, any tensor, is declared as mutated
    so that no compiler reorders collectives. Summed in x's dtype.
    """
    group = _group()
    parts = [x] if group is None else group.all_of(x)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _gathered(*, x: Tensor, size: int, **others: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * size)


@op(mutates=("turn",), shape=_gathered)
def all_gather(x: Tensor, size: int, turn: Tensor) -> Tensor:
    """x [..., N] -> every rank's x, concatenated in rank order [..., N * size]; without a group, x
    is repeated. `size` is the number of ranks, and `turn` as for `all_reduce`.
    """
    group = _group()
    return torch.cat([x] * size if group is None else group.all_of(x), -1)


@op(shape="ids")
def shard_ids(ids: Tensor, rows: int) -> Tensor:
    """ids of any shape -> ids relative to this rank's rows: those in [0, rows) are on this rank.
    Each rank holds `rows` consecutive rows, in rank order."""
    group = _group()
    return ids - (0 if group is None else group.rank * rows)


def _embedded(*, ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@op(shape=_embedded)
def embed_shard(ids: Tensor, weight: Tensor) -> Tensor:
    """ids of any shape, weight [V, K] -> [..., K]: rows of a table of which each rank holds V rows.

    Each rank holds consecutive rows, in rank order. Rows of other ranks are 0, so the sum over the
    ranks is the embedding of the whole table.
    """
    own = shard_ids.reference(ids, weight.shape[0])
    is_here = (own >= 0) & (own < weight.shape[0])
    rows = torch.nn.functional.embedding(own.clamp(0, weight.shape[0] - 1), weight)
    return rows.masked_fill(~is_here.unsqueeze(-1), 0)


@op(mutates=("turn",), shape="x")
def first_rank(x: Tensor, turn: Tensor) -> Tensor:
    """x of any shape -> rank 0's x on every rank, for values that ranks must agree on exactly.

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
torch_impl(all_gather)(all_gather.reference)
torch_impl(embed_shard)(embed_shard.reference)
torch_impl(shard_ids)(shard_ids.reference)


@all_reduce.cases
@first_rank.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes: tuple[Any, ...] = ((1, 1, 64), (1, 7, 33), (5,), (0, 8))
    for shape in shapes:
        turn = torch.zeros(1, device=device)
        yield torch.randn(shape, generator=gen).to(device, dtype), turn


@all_gather.cases
def _gather_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, turn in _cases(device, dtype):
        yield x, 3, turn


@embed_shard.cases
def _embed_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    weight = torch.randn(6, 16, generator=gen).to(device, dtype)
    several: tuple[Any, ...] = ([[0, 5, 6, 11, 17]], [3], [[]])
    for ids in several:
        yield torch.tensor(ids, dtype=torch.int64, device=device), weight


@shard_ids.cases
def _id_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for ids, weight in _embed_cases(device, dtype):
        yield ids, weight.shape[0]
