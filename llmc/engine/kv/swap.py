"""Swap: keeps the blocks of a preempted request in host memory if that beats recomputing them.

    preempted:       device blocks --StepPlan.swap_out--> host slots
    admitted again:  host slots --StepPlan.swap_in--> other device blocks

A device block can be reused as soon as its copy is planned: the runner makes a plan's copies before
it computes tokens, and plans run in order. Within a plan, blocks are swapped out before others are
swapped in, so a slot that this plan empties is free from the next plan on. Blocks that had left an
attention window are neither saved nor allocated again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.engine.kv.prefix_cache import NO_BLOCK, live
from llmc.engine.plan import BlockCopy
from llmc.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCost:
    """Costs measured at startup: the time to compute a token and to copy a block one way."""

    prefill_seconds_per_token: float
    block_bytes: int
    copy_bytes_per_second: float

    def is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying the blocks out and back in is faster than recomputing the tokens."""
        copy_s = 2 * num_blocks * self.block_bytes / self.copy_bytes_per_second
        return copy_s < num_tokens * self.prefill_seconds_per_token


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """Host memory for `num_slots` blocks, and the cost of using it."""

    num_slots: int
    cost: SwapCost


@dataclass(frozen=True, slots=True)
class Saved:
    """The first `num_tokens` tokens of a request, in these slots, which are in the order of
    `BlockTable.blocks`. In each group of layers the first `num_freed` blocks were gone: NO_BLOCK
    takes the place of their slots."""

    slots: list[int]
    num_tokens: int
    num_freed: tuple[int, ...]


class Swapper:
    """Slots of host memory, their contents, and the copies that the next plan must make."""

    def __init__(self, config: SwapConfig, block_size: int) -> None:
        self.config = config
        self._block_size = block_size
        self._free = list(range(config.num_slots - 1, -1, -1))
        self._saved: dict[str, Saved] = {}
        self._emptied: list[int] = []  # by copies of the next plan
        self._out: list[tuple[Request, BlockCopy]] = []
        self._in: list[BlockCopy] = []
        self.num_swaps = 0

    def holds(self, request: Request) -> bool:
        return request.request_id in self._saved

    def save(self, request: Request) -> None:
        """A preempted request is about to lose its blocks: swap them out if that is cheaper."""
        table, num_computed = request.table, request.num_computed
        num_groups = len(table.num_freed)
        blocks = table.blocks[: -(-num_computed // self._block_size) * num_groups]
        num_blocks = len(live(blocks))
        if not 0 < num_blocks <= len(self._free):
            return
        if not self.config.cost.is_cheaper(num_computed, num_blocks):
            return
        slots = [NO_BLOCK if block == NO_BLOCK else self._free.pop() for block in blocks]
        self._saved[request.request_id] = Saved(slots, num_computed, tuple(table.num_freed))
        for block, slot in zip(blocks, slots, strict=True):
            if block != NO_BLOCK:
                self._out.append((request, BlockCopy(source=block, target=slot)))
        self.num_swaps += 1

    def find(self, request: Request, num_computed: int) -> Saved | None:
        """What was saved of a request, if that is more than `num_computed` tokens."""
        saved = self._saved.get(request.request_id)
        return saved if saved is not None and saved.num_tokens > num_computed else None

    def restore(self, request: Request, num_shared: int, num_computed: int) -> int:
        """Plan to copy saved blocks back, except for the first `num_shared`, which are present. The
        request has blocks for them.

        Returns the number of computed tokens afterwards. Nothing is copied if the saved tokens are
        no more than the `num_computed` that the device already has.
        """
        saved = self._saved.pop(request.request_id, None)
        if saved is None:
            return num_computed
        if saved.num_tokens > num_computed:
            blocks = request.table.blocks[num_shared : len(saved.slots)]
            for slot, block in zip(saved.slots[num_shared:], blocks, strict=True):
                if slot != NO_BLOCK:
                    self._in.append(BlockCopy(source=slot, target=block))
            num_computed = saved.num_tokens
        self._emptied += live(saved.slots)
        return num_computed

    def drop(self, request: Request) -> None:
        """Discard what was saved, since it is no longer needed or cannot be trusted."""
        saved = self._saved.pop(request.request_id, None)
        if saved is not None:
            self._out = [(one, copy) for one, copy in self._out if one is not request]
            self._free += live(saved.slots)

    def pop(self) -> tuple[list[Request], list[BlockCopy], list[BlockCopy]]:
        """For the next plan: the requests to save, the copies out and the copies in."""
        if not (self._out or self._emptied):
            return [], [], []
        saved = list({id(request): request for request, _ in self._out}.values())
        out, back = [copy for _, copy in self._out], self._in
        self._free += self._emptied
        self._out, self._in, self._emptied = [], [], []
        return saved, out, back

    def check(self, waiting: Iterable[Request]) -> None:
        """Raise AssertionError unless every slot is free or holds a block of a waiting request."""
        gone = self._saved.keys() - {request.request_id for request in waiting}
        if gone:
            raise AssertionError(f"host memory slots are kept for finished {sorted(gone)}")
        used = [slot for saved in self._saved.values() for slot in live(saved.slots)]
        slots = sorted([*self._free, *self._emptied, *used])
        if slots != list(range(self.config.num_slots)):
            raise AssertionError(f"host memory slots are lost or used twice: {slots}")
