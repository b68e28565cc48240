"""AdapterStore: loads LoRA adapters from disk into host memory, and copies them into slots.

    check (files, shapes) -> begin (read, in a thread) -> copy (into a slot, between two steps)

Host memory keeps the adapters that have slots, and the most recently used of the others.

In a tensor-parallel engine only rank 0 reads adapters, so that an unusable one is refused before
any other rank knows of it. Whatever it copies into a slot it sends to the other ranks, in order
with the steps (`slot_orders`), and each rank takes its own shard.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llmc.compiler.program import Program
from llmc.lora_request import LoRARequest
from llmc.passes.inputs import AdapterInput, Shard, WeightInput
from llmc.runner.ranks import Kind, Order, Ranks
from llmc.weights.checkpoint import SomeOf
from llmc.weights.load import WeightSource
from llmc.weights.lora import (
    LoraWeights,
    PlainWeight,
    StoredAdapter,
    open_adapter,
    read_adapter,
)
from llmc.weights.lora_places import LoraPlace, LoraSize
from llmc.weights.parameters import Parameters

_MAX_CHECKED = 256  # adapters whose headers are cached


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """Slots for the adapters of one parameter: a [slots, R, K] and b [slots, R, N].

    For an embedding, K is the number of rows and N their length. Routed experts have
    a [slots, E, R, K] and b [slots, E, R, N]. `shard`: this rank's part of N (0) or K (1).
    """

    a: Tensor
    b: Tensor
    shard: Shard | None = None


LoraTargets = dict[LoraPlace, list[LoraTarget]]


def lora_targets(program: Program, bound: Mapping[str, Tensor]) -> LoraTargets:
    """Targets by parameter name; tied parameters are under each name. `bound`: the step's tensors.

    A weight with several names that is read in several places is left out: PEFT has an adapter for
    each name, and the graph does not say which name belongs to which place.
    """
    pairs: dict[AdapterInput, dict[str, list[Tensor]]] = {}
    for node, role in program.adapter_inputs():
        matrices = pairs.setdefault(replace(role, matrix="a"), {"a": [], "b": []})
        matrices[role.matrix].append(bound[node.name])
    targets: LoraTargets = defaultdict(list)
    for role, matrices in pairs.items():
        for a, b in zip(matrices["a"], matrices["b"], strict=True):
            shards = role.shards or [None] * len(role.weights)
            if role.op == "experts":
                ((weight, shard),) = zip(role.weights, shards, strict=True)
                targets[LoraPlace(weight, role.op)].append(LoraTarget(a=a, b=b, shard=shard))
                continue
            parts = a.transpose(1, 2).unsqueeze(1) if role.op == "embedding" else a
            first = 0
            for part, (weight, width) in enumerate(zip(role.weights, role.widths, strict=True)):
                own_b = b[:, :, first : first + width]
                target = LoraTarget(a=parts[:, part], b=own_b, shard=shards[part])
                for name in program.parameters.aliases.get(weight, (weight,)):
                    targets[LoraPlace(name, role.op)].append(target)
                first += width
    aliases = program.parameters.aliases
    return {p: found for p, found in targets.items() if len(found) == 1 or p.weight not in aliases}


def target_sizes(targets: LoraTargets) -> dict[LoraPlace, LoraSize]:
    """The unsharded size of each parameter that can have adapters."""
    sizes = {}
    for place, (target, *_) in targets.items():
        *experts, rank, depth = target.a.shape[1:]
        channels, shard = target.b.shape[-1], target.shard
        if shard is not None and shard.dim == 0:
            channels = shard.whole
        elif shard is not None:
            depth = shard.whole
        sizes[place] = LoraSize(channels, depth, rank, *experts)
    return sizes


def plain_weights(
    program: Program, bound: Mapping[str, Tensor], open_source: Callable[[], WeightSource]
) -> dict[str, PlainWeight]:
    """The model's parameters that the step uses unchanged, except for their dtype. Sharded ones are
    read from the checkpoint, which `open_source` opens."""
    plain = {}
    for node, role in program.weight_inputs():
        weight = role.parts[0]
        if node.name not in bound or replace(role, shards=()) != WeightInput(parts=(weight,)):
            continue
        own = bound[node.name]
        held = PlainWeight.of(own)
        if role.shards:
            shape = program.parameters.shapes[weight]
            held = PlainWeight(shape, partial(_stored_rows, open_source, weight, shape, own.dtype))
        for name in program.parameters.aliases.get(weight, (weight,)):
            plain[name] = held
    return plain


def _stored_rows(
    open_source: Callable[[], WeightSource],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    start: int,
    count: int,
) -> Tensor:
    rows = torch.empty(count, *shape[1:], dtype=dtype)
    open_source().fill(name, rows, SomeOf(shape=shape, dim=0, ranges=((start, count),)))
    return rows


def fill_slot(targets: LoraTargets, slot: int, weights: LoraWeights, rank: int = 0) -> None:
    """Write an adapter into a slot (counted from 1), replacing its contents. Of sharded matrices,
    write that rank's shard."""
    empty_slot(targets, slot)
    for place, (a, b) in weights.items():
        _fill(targets[place], slot, a, b, rank)


def empty_slot(targets: LoraTargets, slot: int) -> None:
    for target in (target for some in targets.values() for target in some):
        target.b[slot - 1].zero_()  # then an earlier adapter's values in A have no effect


def _fill(targets: list[LoraTarget], slot: int, a: Tensor, b: Tensor, rank: int) -> None:
    """a [.., r, K] and b [.., N, r]"""
    ranks = a.shape[-2]
    for target in targets:
        own_a, own_b = a, b.mT
        if target.shard is not None and target.shard.dim == 0:
            own_b = replace(target.shard, dim=-1).of(own_b, rank)
        elif target.shard is not None:
            own_a = replace(target.shard, dim=-1).of(own_a, rank)
        target.a[slot - 1][..., :ranks, :].copy_(own_a)
        target.b[slot - 1][..., :ranks, :].copy_(own_b)


def slot_orders(targets: LoraTargets, slot: int, weights: LoraWeights) -> Iterator[Order]:
    """The orders to other ranks that copy an adapter into a slot: first to empty the slot, then A
    and B of each place, identified by its index among the targets."""
    yield Order(kind=Kind.ADAPTER, numbers=(slot,))
    numbers = {place: number for number, place in enumerate(targets)}
    for place, pair in weights.items():
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in pair)
        padding = a.new_zeros(-(len(a) + len(b)) % 4)
        words = torch.cat((a, b, padding)).view(torch.int32).numpy()
        shapes = (*pair[0].shape, *pair[1].shape)
        yield Order(kind=Kind.ADAPTER, numbers=(slot, numbers[place], *shapes), words=words)


def follow_slot_order(targets: LoraTargets, order: Order, rank: int) -> None:
    """Carry out one of the `slot_orders` on another rank."""
    slot, *rest = order.numbers
    if not rest:
        empty_slot(targets, slot)
        return
    number, *shapes = rest
    some = list(targets.values())[number]
    half = len(shapes) // 2
    dtype = some[0].a.dtype
    values = torch.from_numpy(np.array(order.words)).view(dtype)
    sizes = [torch.Size(shape).numel() for shape in (shapes[:half], shapes[half:])]
    a, b, *_ = values.split([*sizes, len(values) - sum(sizes)])
    _fill(some, slot, a.view(shapes[:half]), b.view(shapes[half:]), rank)


class AdapterStore:
    """Implements the engine's AdapterLoader protocol; `copy` and `follow` are for the runner.

    `parameters`: the model's; `plain`: those that adapters can contain copies of. At most
    `max_in_memory` adapters (at least `num_slots`) are kept in host memory. `ranks`: the engine's
    tensor-parallel ranks.
    """

    def __init__(
        self,
        targets: LoraTargets,
        parameters: Parameters,
        plain: Mapping[str, PlainWeight],
        *,
        num_slots: int,
        max_in_memory: int,
        max_expert_rank: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._targets = targets
        self._parameters = parameters
        self._plain = plain
        self._max_in_memory = max_in_memory
        self._max_expert_rank = max_expert_rank
        self._ranks = ranks
        self._sizes = target_sizes(targets)
        self._checked: OrderedDict[LoRARequest, StoredAdapter] = OrderedDict()
        # read or being read; least recently used first
        self._read: OrderedDict[LoRARequest, Future[LoraWeights]] = OrderedDict()
        self._with_slot: set[LoRARequest] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmc-adapters")

    def check(self, adapter: LoRARequest) -> None:
        """Raise InvalidRequestError unless files and shapes are right."""
        if adapter not in self._read:
            self._open(adapter)

    def _open(self, adapter: LoRARequest) -> StoredAdapter:
        stored = self._checked.get(adapter)
        if stored is None:
            stored = open_adapter(adapter, self._sizes, self._parameters, self._max_expert_rank)
            self._checked[adapter] = stored
            if len(self._checked) > _MAX_CHECKED:
                self._checked.popitem(last=False)
        return stored

    def begin(self, adapter: LoRARequest, instead_of: LoRARequest | None) -> Future[LoraWeights]:
        if instead_of is not None:
            self._with_slot.discard(instead_of)
        for one, read in list(self._read.items()):
            if read.done() and read.exception() is not None:  # the engine takes its slot back
                del self._read[one]
                self._with_slot.discard(one)
        self._with_slot.add(adapter)
        known = self._read.get(adapter)
        if known is None:
            known = self._read[adapter] = self._reader.submit(self._load, adapter)
        self._read.move_to_end(adapter)
        for old in [one for one in self._read if one not in self._with_slot]:
            if len(self._read) > self._max_in_memory:
                del self._read[old]
        return known

    def _load(self, adapter: LoRARequest) -> LoraWeights:
        dtype = next(iter(self._targets.values()))[0].a.dtype
        return read_adapter(adapter, self._open(adapter), dtype, self._plain)

    def copy(self, slot: int, adapter: LoRARequest) -> None:
        """Copy an adapter that has been read into a slot (counted from 1) on all ranks."""
        weights = self._read[adapter].result()
        if self._ranks is not None:
            for order in slot_orders(self._targets, slot, weights):
                self._ranks.tell(order)
        fill_slot(self._targets, slot, weights)

    def follow(self, order: Order) -> None:
        """Carry out rank 0's `copy` on another rank."""
        assert self._ranks is not None, "an order came to an engine of one rank"
        follow_slot_order(self._targets, order, self._ranks.rank)
