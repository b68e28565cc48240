"""AdapterStore: LoRA adapters from disk into host memory, and from there into slots of the graph.

    check (files, shapes) -> begin (read, in a thread) -> copy (into a slot, between two steps)

Host memory keeps the adapters that have slots, and of the others those used last.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from llmc.compiler.program import Program
from llmc.lora_request import LoRARequest
from llmc.weights.lora import LoraPart, LoraWeights, open_adapter, read_adapter

_MOST_CHECKED = 256  # adapters whose headers are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """Where the adapters on one parameter go: a [slots, R, K] and b [slots, R, N]."""

    a: Tensor
    b: Tensor


def lora_targets(program: Program, bound: Mapping[str, Tensor]) -> dict[str, list[LoraTarget]]:
    """By the names of the parameters, tied ones by each of theirs. `bound`: tensors of the step."""
    pairs: dict[tuple[tuple[str, ...], tuple[int, ...]], dict[str, list[Tensor]]] = {}
    for node, role in program.adapter_inputs():
        matrices = pairs.setdefault((role.weights, role.widths), {"a": [], "b": []})
        matrices[role.matrix].append(bound[node.name])
    targets: dict[str, list[LoraTarget]] = defaultdict(list)
    for (weights, widths), matrices in pairs.items():
        for a, b in zip(matrices["a"], matrices["b"], strict=True):
            first = 0
            for part, (weight, width) in enumerate(zip(weights, widths, strict=True)):
                target = LoraTarget(a=a[:, part], b=b[:, :, first : first + width])
                for name in program.parameters.aliases.get(weight, (weight,)):
                    targets[name].append(target)
                first += width
    return dict(targets)


def target_shapes(targets: Mapping[str, list[LoraTarget]]) -> dict[str, tuple[int, int]]:
    """N and K of each parameter [N, K] that adapters may be on."""
    return {name: (some[0].b.shape[2], some[0].a.shape[2]) for name, some in targets.items()}


def fill_slot(targets: Mapping[str, list[LoraTarget]], slot: int, weights: LoraWeights) -> None:
    """Put an adapter into a slot, from 1, in place of the one that was there."""
    for name, some in targets.items():
        for target in some:
            a, b = target.a[slot - 1], target.b[slot - 1]
            b.zero_()  # so that what an earlier adapter left in A counts for nothing
            given = weights.get(name)
            if given is not None:
                rank = given[0].shape[0]
                a[:rank].copy_(given[0])
                b[:rank].copy_(given[1].T)


class AdapterStore:
    """Implements the engine's AdapterLoader protocol; `copy` is for the runner.

    At most `max_in_memory` adapters are in host memory, which is at least `num_slots`.
    """

    def __init__(
        self,
        targets: Mapping[str, list[LoraTarget]],
        *,
        num_slots: int,
        max_rank: int,
        max_in_memory: int,
    ) -> None:
        self.num_slots = num_slots
        self._targets = targets
        self._max_rank = max_rank
        self._max_in_memory = max_in_memory
        self._shapes = target_shapes(targets)
        self._checked: OrderedDict[LoRARequest, dict[str, LoraPart]] = OrderedDict()
        # read or being read; least recently used first
        self._read: OrderedDict[LoRARequest, Future[LoraWeights]] = OrderedDict()
        self._with_slot: set[LoRARequest] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmc-adapters")

    def check(self, adapter: LoRARequest) -> None:
        """Raises InvalidRequestError unless files and shapes are right."""
        if adapter not in self._read:
            self._parts(adapter)

    def _parts(self, adapter: LoRARequest) -> dict[str, LoraPart]:
        parts = self._checked.get(adapter)
        if parts is None:
            parts = open_adapter(adapter, self._shapes, self._max_rank)
            self._checked[adapter] = parts
            if len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        return parts

    def begin(self, adapter: LoRARequest, instead_of: LoRARequest | None) -> Future[LoraWeights]:
        if instead_of is not None:
            self._with_slot.discard(instead_of)
        self._with_slot.add(adapter)
        known = self._read.get(adapter)
        if known is None or (known.done() and known.exception() is not None):
            known = self._read[adapter] = self._reader.submit(self._load, adapter)
        self._read.move_to_end(adapter)
        for old in [one for one in self._read if one not in self._with_slot]:
            if len(self._read) > self._max_in_memory:
                del self._read[old]
        return known

    def _load(self, adapter: LoRARequest) -> LoraWeights:
        dtype = next(iter(self._targets.values()))[0].a.dtype
        return read_adapter(adapter, self._parts(adapter), dtype)

    def copy(self, slot: int, adapter: LoRARequest) -> None:
        """Put an adapter that has been read into a slot, from 1."""
        fill_slot(self._targets, slot, self._read[adapter].result())
