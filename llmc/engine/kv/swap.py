"""Swap: the blocks of a preempted request wait in host memory, where that beats recomputing them.

    preempted:   device blocks --StepPlan.swap_out--> host slots
    seated again: host slots --StepPlan.swap_in--> other device blocks

A device block may be given to somebody else as soon as its copy is planned: the runner makes a
plan's copies before its tokens are computed, and plans run in order. Inside a plan what goes out
is copied before what comes in, so a slot that this plan empties is free for the next one only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.engine.plan import BlockCopy
from llmc.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCost:
    """Measured at start: what a token costs to compute, and a block to copy one way."""

    prefill_seconds_per_token: float
    block_bytes: int
    copy_bytes_per_second: float

    def is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to copy the blocks out and back in rather than compute the tokens again."""
        copy_s = 2 * num_blocks * self.block_bytes / self.copy_bytes_per_second
        return copy_s < num_tokens * self.prefill_seconds_per_token


@dataclass(frozen=True, slots=True)
class SwapRoom:
    """Host memory of so many blocks, and what it costs to use it."""

    num_slots: int
    cost: SwapCost


class Swapper:
    """Slots of host memory, and the copies that the next plan must make. None: no room at all."""

    def __init__(self, room: SwapRoom | None, block_size: int) -> None:
        self._room = room
        self._block_size = block_size
        self._free = list(range(room.num_slots - 1, -1, -1)) if room else []
        self._emptied: list[int] = []  # by copies of the next plan
        self._out: list[tuple[Request, BlockCopy]] = []
        self._in: list[BlockCopy] = []
        self.num_swaps = 0

    def save(self, request: Request) -> None:
        """A preempted request is about to lose its blocks: keep what they hold, if it is worth it.

        Not for one of a group: its prompt's blocks are shared, and stay where they are.
        """
        num_blocks = -(-request.num_computed // self._block_size)
        if self._room is None or request.group is not None:
            return
        if not 0 < num_blocks <= len(self._free):
            return
        if not self._room.cost.is_cheaper(request.num_computed, num_blocks):
            return
        request.num_saved = request.num_computed
        request.host_slots = [self._free.pop() for _ in range(num_blocks)]
        for block, slot in zip(request.blocks, request.host_slots, strict=False):
            self._out.append((request, BlockCopy(source=block, target=slot)))
        self.num_swaps += 1

    def restore(self, request: Request, num_shared: int, num_computed: int) -> int:
        """Bring back what was saved into the blocks after the first `num_shared`.

        Returns how many tokens are there then; nothing is copied where `num_computed` already are.
        """
        if request.num_saved > num_computed:
            slots = request.host_slots
            blocks = request.blocks[: len(slots)]
            for slot, block in zip(slots[num_shared:], blocks[num_shared:], strict=True):
                self._in.append(BlockCopy(source=slot, target=block))
            num_computed = request.num_saved
        self._emptied += request.host_slots
        request.host_slots, request.num_saved = [], 0
        return num_computed

    def drop(self, request: Request) -> None:
        """What was saved is not wanted any more, or can't be trusted."""
        if request.host_slots:
            self._out = [(one, copy) for one, copy in self._out if one is not request]
            self._free += request.host_slots
            request.host_slots, request.num_saved = [], 0

    def pop(self) -> tuple[list[Request], list[BlockCopy], list[BlockCopy]]:
        """For the plan that is made now: who is saved by it, copies out, copies in."""
        if not (self._out or self._emptied):
            return [], [], []
        saved = list({id(request): request for request, _ in self._out}.values())
        out, back = [copy for _, copy in self._out], self._in
        self._free += self._emptied
        self._out, self._in, self._emptied = [], [], []
        return saved, out, back

    def check(self, waiting: Iterable[Request]) -> None:
        """Raise AssertionError unless every slot is free or one waiting request's."""
        held = [slot for request in waiting for slot in request.host_slots]
        slots = sorted([*self._free, *self._emptied, *held])
        if slots != list(range(self._room.num_slots if self._room else 0)):
            raise AssertionError(f"slots of host memory are lost or held twice: {slots}")
