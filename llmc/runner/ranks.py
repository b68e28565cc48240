"""Rank 0 of a tensor-parallel engine sends each step to the other ranks, which run the same one.

    rank 0: plan -> delta -> step            (the engine's runner)
                 \\ Order                     in words, over a channel to each rank
    rank 1:       -> delta -> step           (a runner in its own process)

An order contains what the device is sent for a step, which is small and independent of requests. So
the other ranks have no engine, no tokenizer and no host state of rows. The orders contain every
change that the engine makes to device state, in sequence.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from llmc.engine.plan import StepPlan
from llmc.kernels.collectives import Group
from llmc.kernels.prompts import Prompts
from llmc.runner.delta import Delta
from llmc.runner.graphs import StepShape
from llmc.runner.rows import Words

_MAX_BYTES = 1 << 30  # maximum size of an order; a larger one is corrupt


class Kind(IntEnum):
    """What the other ranks are to do; the order's `numbers` are the arguments."""

    STEP = 0  # see `step_order`
    DUMMY_RUN = 1  # rows, tokens per row, samples per row
    CAPTURE = 2  # tokens, requests, samples, whether of the step to swap in
    MAKE_RUNNER = 3  # blocks, context, snapshots, steps in flight, level, whether it will serve
    LEAST_MEMORY = 4  # no numbers: all ranks compute the minimum of their free memory
    ADAPTER = 5  # see `adapter_store.slot_orders`
    AGREE = 6  # no numbers: all ranks find out whether each of them has a step to swap in
    SWAP = 7  # whether to swap it in, rather than to drop it


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    kind: Kind
    numbers: Sequence[int] = ()
    words: Words = field(default_factory=lambda: np.empty(0, np.int32))

    def pack(self) -> bytes:
        """Kind and both counts, then the numbers (all int64), then the words (int32)."""
        head = np.array([self.kind, len(self.numbers), len(self.words)], np.int64)
        return head.tobytes() + np.array(self.numbers, np.int64).tobytes() + self.words.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank's place among the ranks of its engine. `tell` is for rank 0, which sends orders."""

    group: Group
    tell: Callable[[Order], None] = lambda order: None
    why: Callable[[], str] = lambda: ""  # which rank has exited and how; "" while all run

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


class _StepHead(NamedTuple):
    """The first numbers of a step's order. Behind them are the slots to swap out to, those to swap
    in from, and the lengths of the prompts."""

    shape_tokens: int
    shape_requests: int
    shape_samples: int
    num_segments: int
    num_requests: int
    num_tokens: int
    num_samples: int
    copies: int
    num_copies: int
    swaps: int
    states: int
    num_loads: int
    num_saves: int
    first_request: int  # of the prompts
    first_token: int
    num_out: int
    num_back: int


_OF_DELTA = _StepHead._fields[3:13]  # fields that `Delta` has too


def step_order(plan: StepPlan, shape: StepShape, delta: Delta) -> Order:
    """The plan's delta, and the other parts of the plan that a runner acts on."""
    out = [copy.target for copy in plan.swap_out]
    back = [copy.source for copy in plan.swap_in]
    head = _StepHead(
        *shape,
        **{name: getattr(delta, name) for name in _OF_DELTA},
        first_request=delta.prompts.first_request,
        first_token=delta.prompts.first_token,
        num_out=len(out),
        num_back=len(back),
    )
    numbers = (*head, *out, *back, *delta.prompts.lengths)
    return Order(kind=Kind.STEP, numbers=numbers, words=delta.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStep:
    """The contents of a `step_order`. The delta lacks what only rank 0 needs to read results."""

    shape: StepShape
    delta: Delta
    out_slots: Sequence[int]  # of host memory
    back_slots: Sequence[int]

    @staticmethod
    def of(order: Order) -> ReceivedStep:
        numbers = iter(map(int, order.numbers))
        head = _StepHead(*islice(numbers, len(_StepHead._fields)))
        out, back = list(islice(numbers, head.num_out)), list(islice(numbers, head.num_back))
        prompts = Prompts(
            first_request=head.first_request, first_token=head.first_token, lengths=tuple(numbers)
        )
        delta = Delta(
            **{name: getattr(head, name) for name in _OF_DELTA},
            words=order.words,
            num_sampled=head.num_samples,
            picks=0,
            picked=(),
            wanted=(),
            scored=frozenset(),
            prompts=prompts,
            long_prompts=Prompts(),  # for attention over latents, which several ranks don't use
        )
        shape = StepShape(head.shape_tokens, head.shape_requests, head.shape_samples)
        return ReceivedStep(shape=shape, delta=delta, out_slots=out, back_slots=back)


def receive(channel: socket.socket) -> Order | None:
    """The next order; None at the end of the channel, when rank 0 has exited."""
    head = read_exactly(channel, 24)
    if head is None:
        return None
    kind, numbers, words = np.frombuffer(head, np.int64).tolist()
    if min(numbers, words) < 0 or 8 * numbers + 4 * words > _MAX_BYTES:
        raise ValueError(f"an order of {numbers} numbers and {words} words is corrupt")
    body = read_exactly(channel, 8 * numbers + 4 * words)
    if body is None:
        return None
    return Order(
        kind=Kind(kind),
        numbers=np.frombuffer(body, np.int64, numbers).tolist(),
        words=np.frombuffer(body, np.int32, words, 8 * numbers),
    )


def read_exactly(channel: socket.socket, count: int) -> bytearray | None:
    """Read `count` bytes; None if the channel ends before that."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = channel.recv_into(view[done:])
        if got == 0:
            return None
        done += got
    return data
