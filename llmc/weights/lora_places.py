"""Maps the modules in an adapter's file to parameters, and to an expert of routed experts.

<module>                    the linear or embedding whose weight is <module>.weight
<module>[.base_layer ...]   with `target_parameters`: PEFT wraps the module once for each of its
                            parameters named there, in order, the first innermost
<experts>.<number>.<linear> one expert's part of a parameter that stacks them, named as in
                            checkpoints that store experts separately
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.passes.inputs import AdaptedOp
from llmc.weights.parameters import Parameters

_NUMBER = re.compile(r"(?<=\.)\d{1,6}(?=\.)", re.ASCII)


class LoraPlace(NamedTuple):
    """A target of adapters: a parameter, and the kind of op that reads it."""

    weight: str
    op: AdaptedOp = "linear"


class LoraSize(NamedTuple):
    """N and K of a place, its maximum rank, and the number of stacked experts (0: not stacked)."""

    channels: int
    depth: int
    max_rank: int
    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """`name` is the name that PEFT matches its patterns against.

    `expert`: the expert that it adapts, and of it only channels of part `part` of `parts`; None: it
    adapts the whole place.
    """

    place: LoraPlace
    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


class AdaptedModules:
    """Finds the targets of an adapter's modules. `target_parameters`: from the adapter's config."""

    def __init__(
        self,
        targets: Mapping[LoraPlace, LoraSize],
        parameters: Parameters,
        target_parameters: Sequence[str],
    ) -> None:
        self._targets = targets
        self._parameters = parameters
        self._wrapped = _wrapped(parameters, target_parameters)
        self._experts = {
            template: (name, part, len(templates))
            for name, templates in parameters.experts.items()
            for part, template in enumerate(templates)
        }

    def find(self, module: str, op: AdaptedOp) -> AdaptedModule | None:
        """A module's target; None if ambiguous, or neither experts nor a plain linear weight."""
        if op == "embedding":
            return AdaptedModule(place=LoraPlace(f"{module}.weight", op), name=module)
        parameter = self._wrapped.get(module)
        if parameter is not None:
            return self._of_parameter(parameter)
        for number in _NUMBER.finditer(module):
            template = f"{module[: number.start()]}{{}}{module[number.end() :]}"
            if template in self._experts:
                name, part, parts = self._experts[template]
                return AdaptedModule(
                    place=LoraPlace(name, "experts"),
                    name=module,
                    expert=int(number[0]),
                    part=part,
                    parts=parts,
                )
        return AdaptedModule(place=LoraPlace(f"{module}.weight"), name=module)

    def is_shared(self, module: str) -> bool:
        """Whether the module's weight is shared with other modules."""
        return f"{module}.weight" in self._parameters.aliases

    def _of_parameter(self, name: str) -> AdaptedModule | None:
        shape = self._parameters.shapes[name]
        if len(shape) == 3:
            return AdaptedModule(place=LoraPlace(name, "experts"), name=name)
        # A square weight may be stored transposed. A weight with several names is read by several
        # modules, only one of which PEFT adapts.
        place = LoraPlace(name)
        size = self._targets.get(place)
        is_plain = size is not None and shape == size[:2] != size[1::-1]
        if not is_plain or name in self._parameters.aliases:
            return None
        return AdaptedModule(place=place, name=name)


def _wrapped(parameters: Parameters, asked: Sequence[str]) -> dict[str, str]:
    """The parameter that each of PEFT's wrappers adapts, by the wrapper's name in the file."""
    endings = tuple(f".{one}" for one in asked)
    of_module: dict[str, list[str]] = {}
    for name in parameters.shapes:
        if f".{name}".endswith(endings):
            of_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        module + ".base_layer" * (len(names) - 1 - i): name
        for module, names in of_module.items()
        for i, name in enumerate(names)
    }
