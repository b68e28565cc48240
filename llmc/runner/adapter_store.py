"""AdapterStore: LoRA adapters from disk into host memory, and from there into slots of the graph.

    check (files, shapes) -> begin (read, in a thread) -> copy (into a slot, between two steps)

Host memory keeps the adapters that have slots, and of the others those used last.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor

from llmc.compiler.program import Program
from llmc.lora_request import LoRARequest
from llmc.passes.inputs import AdapterInput, WeightInput
from llmc.weights.lora import LoraWeights, StoredAdapter, open_adapter, read_adapter
from llmc.weights.lora_places import LoraPlace, LoraSize
from llmc.weights.parameters import Parameters

_MOST_CHECKED = 256  # adapters whose headers are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTarget:
    """Where the adapters on one parameter go: a [slots, R, K] and b [slots, R, N].

    Of an embedding K is the number of its rows, and N the length of one. Of routed experts
    a [slots, E, R, K] and b [slots, E, R, N].
    """

    a: Tensor
    b: Tensor


LoraTargets = dict[LoraPlace, list[LoraTarget]]


def lora_targets(program: Program, bound: Mapping[str, Tensor]) -> LoraTargets:
    """By the names of the parameters, tied ones by each of theirs. `bound`: tensors of the step."""
    pairs: dict[AdapterInput, dict[str, list[Tensor]]] = {}
    for node, role in program.adapter_inputs():
        matrices = pairs.setdefault(replace(role, matrix="a"), {"a": [], "b": []})
        matrices[role.matrix].append(bound[node.name])
    targets: LoraTargets = defaultdict(list)
    for role, matrices in pairs.items():
        for a, b in zip(matrices["a"], matrices["b"], strict=True):
            if role.op == "experts":
                (weight,) = role.weights
                targets[LoraPlace(weight, role.op)].append(LoraTarget(a=a, b=b))
                continue
            parts = a.transpose(1, 2).unsqueeze(1) if role.op == "embedding" else a
            first = 0
            for part, (weight, width) in enumerate(zip(role.weights, role.widths, strict=True)):
                target = LoraTarget(a=parts[:, part], b=b[:, :, first : first + width])
                for name in program.parameters.aliases.get(weight, (weight,)):
                    targets[LoraPlace(name, role.op)].append(target)
                first += width
    return dict(targets)


def target_sizes(targets: LoraTargets) -> dict[LoraPlace, LoraSize]:
    """Of each parameter that adapters may be on."""
    sizes = {}
    for place, (target, *_) in targets.items():
        *experts, rank, depth = target.a.shape[1:]
        sizes[place] = LoraSize(target.b.shape[-1], depth, rank, *experts)
    return sizes


def plain_weights(program: Program, bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's parameters that are in the step as they were stored but for their dtype."""
    plain = {}
    for node, role in program.weight_inputs():
        if node.name in bound and role == WeightInput(parts=role.parts[:1]):
            (weight,) = role.parts
            for name in program.parameters.aliases.get(weight, (weight,)):
                plain[name] = bound[node.name]
    return plain


def fill_slot(targets: LoraTargets, slot: int, weights: LoraWeights) -> None:
    """Put an adapter into a slot, from 1, in place of the one that was there."""
    for target in (target for some in targets.values() for target in some):
        target.b[slot - 1].zero_()  # what an earlier adapter left in A then counts for nothing
    for place, (given_a, given_b) in weights.items():
        for target in targets[place]:
            rank = given_a.shape[-2]
            target.a[slot - 1][..., :rank, :].copy_(given_a)
            target.b[slot - 1][..., :rank, :].copy_(given_b.mT)


class AdapterStore:
    """Implements the engine's AdapterLoader protocol; `copy` is for the runner.

    `parameters`: the model's; `plain`: those of which adapters may have copies. At most
    `max_in_memory` adapters are in host memory, which is at least `num_slots`.
    """

    def __init__(
        self,
        targets: LoraTargets,
        parameters: Parameters,
        plain: Mapping[str, Tensor],
        *,
        num_slots: int,
        max_in_memory: int,
    ) -> None:
        self.num_slots = num_slots
        self._targets = targets
        self._parameters = parameters
        self._plain = plain
        self._max_in_memory = max_in_memory
        self._sizes = target_sizes(targets)
        self._checked: OrderedDict[LoRARequest, StoredAdapter] = OrderedDict()
        # read or being read; least recently used first
        self._read: OrderedDict[LoRARequest, Future[LoraWeights]] = OrderedDict()
        self._with_slot: set[LoRARequest] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmc-adapters")

    def check(self, adapter: LoRARequest) -> None:
        """Raises InvalidRequestError unless files and shapes are right."""
        if adapter not in self._read:
            self._open(adapter)

    def _open(self, adapter: LoRARequest) -> StoredAdapter:
        stored = self._checked.get(adapter)
        if stored is None:
            stored = open_adapter(adapter, self._sizes, self._parameters)
            self._checked[adapter] = stored
            if len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        return stored

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
        return read_adapter(adapter, self._open(adapter), dtype, self._plain)

    def copy(self, slot: int, adapter: LoRARequest) -> None:
        """Put an adapter that has been read into a slot, from 1."""
        fill_slot(self._targets, slot, self._read[adapter].result())
