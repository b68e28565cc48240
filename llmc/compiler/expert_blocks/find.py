"""What a recorded loop over experts computes, found by values, not by how the code spells it.

The expert of number e[t, k] gets row t of some [T, D] that the code computed before. Their results
are one tensor [T K, D], or summed by token with weights w[t, k], in the tensor that is read later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.compiler.expert_blocks.record import (
    NotUnderstood,
    Recording,
    Value,
    inner_values,
)
from llmc.compiler.expert_blocks.routing import Experts, Routing, combined

# relative to the largest value; routing may be in float32 where the rest is in float64
_TOLERANCE = 1e-5
_ROUNDED = 2**-6  # of sums in another order in 16 bits


# Functions whose result does not depend on the data of their arguments.
_FILLS = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like",
    "zeros_like",
}  # fmt: skip

_TESTS = ("nonzero", "gt", "ne", "__ne__")
_VIEWS = {"__getitem__", "flatten", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze",
          "view"}  # fmt: skip


class Analysis:
    """A recording, and what depends on the experts in it."""

    def __init__(self, recording: Recording, experts: Experts, count: int) -> None:
        """`experts`: what was run in place of `count` experts."""
        self.recording = recording
        self._experts, self._count = experts, count

    def choices(self) -> list[tuple[Value, Value]]:
        """All values that can be the rows and the experts' numbers, in the code's order."""
        tokens, known = self.recording.tokens, self.recording.known
        calls = self.recording.expert_calls
        computed = {
            rows: {(t, call.number) for call, own in zip(calls, found, strict=True) for t in own}
            for rows, tensor in known.items()
            if (found := self._tokens(tensor)) is not None
        }
        numbers = {
            expert: {
                (t, e) for t, row in enumerate(tensor.reshape(tokens, -1).tolist()) for e in row
            }
            for expert, tensor in known.items()
            if self._may_be_numbers(tensor)
        }
        # code may compute experts that were not chosen, for a weight of zero
        return [
            (rows, expert)
            for rows, pairs in computed.items()
            for expert, chosen in numbers.items()
            if chosen <= pairs
        ]

    def branches_on_others(self, routing: Routing) -> bool:
        """Whether the code may branch on anything but the chosen experts' numbers, or on whether an
        expert has a weight, which tells the same."""
        signs = self._signs(routing.expert)
        stack = [(value, False) for value in self.recording.branches]
        seen = set()
        while stack:
            value, of_sign = stack.pop()
            if value == routing.expert or (of_sign and value in signs) or (value, of_sign) in seen:
                continue
            seen.add((value, of_sign))
            for index in (value.call, *value.changes):
                call = self.recording.calls[index]
                name = getattr(call.target, "__name__", "")
                if call.kind != "function":
                    return True
                if name not in _FILLS:
                    is_test = name in _TESTS and call.args[1:] in ((), (0,))
                    is_next = is_test or (of_sign and name in _VIEWS)
                    stack += [(inner, is_next) for inner in inner_values(call)]
        return False

    def _signs(self, expert: Value) -> set[Value]:
        """Values [T, E] that are zero for the experts that are not chosen, and only for them."""
        known, tokens = self.recording.known, self.recording.tokens
        chosen = torch.zeros(tokens, self._count, dtype=torch.bool)
        chosen.scatter_(1, known[expert].reshape(tokens, -1).long(), True)
        return {
            value
            for value, tensor in known.items()
            if tensor.numel() == chosen.numel()
            and torch.equal(tensor.reshape(chosen.shape) != 0, chosen)
        }

    def routings(self, rows: Value, expert: Value) -> tuple[list[Routing], Value]:
        """All that can be computed with these rows and numbers, and the value that holds it."""
        extras = self._extras(rows, expert)
        seen: set[Value] = set()
        found: dict[Value, list[Routing]] = {}
        stack = inner_values(self.recording.result)
        while stack:
            value = stack.pop()
            if value in seen or not self.recording.depends(value):
                continue
            seen.add(value)
            if routings := self._of_result(rows, expert, extras, value):
                found[value] = routings
                continue
            source = self.recording.source(value)
            if source is None or source.kind == "expert" or value not in self.recording.read:
                raise NotUnderstood("what it adds up is not the weighted results of its experts")
            stack += inner_values(source)
        if not found:
            raise NotUnderstood("its result does not depend on its experts")
        if len(found) > 1:
            raise NotUnderstood("it uses the experts' results more than once")
        [(value, routings)] = found.items()
        return routings, value

    def _tokens(self, tensor: Tensor) -> list[list[int]] | None:
        """The tokens of each call of an expert; None if not all rows are of this tensor."""
        calls = self.recording.expert_calls
        tokens, width = self.recording.tokens, calls[0].rows.shape[-1]
        if tensor.numel() != tokens * width or tensor.shape[-1] != width:
            return None
        token_of = {_bits(row): t for t, row in enumerate(tensor.reshape(tokens, width))}
        found = []
        for call in calls:
            rows = call.rows.reshape(-1, width)
            own = [token_of.get(_bits(row), -1) for row in rows]
            if call.rows.dtype != tensor.dtype or -1 in own:
                return None
            found.append(own)
        return found

    def _extras(self, rows: Value, expert: Value) -> tuple[Value, ...]:
        """What else the experts get: for each token and expert, an element of each of these."""
        known, calls = self.recording.known, self.recording.expert_calls
        if not calls[0].extras:
            return ()
        tokens = self._tokens(known[rows])
        number = known[expert].reshape(self.recording.tokens, -1).tolist()
        assert tokens is not None
        if any(
            call.number not in number[t]
            for call, own in zip(calls, tokens, strict=True)
            for t in own
        ):
            raise NotUnderstood("its experts get numbers for tokens that did not choose them")
        places = [
            [(t, number[t].index(call.number)) for t in own]
            for call, own in zip(calls, tokens, strict=True)
        ]

        def is_extra(tensor: Tensor, i: int) -> bool:
            if tensor.numel() != len(number) * len(number[0]):
                return False
            table = tensor.reshape(len(number), -1)
            return all(
                torch.equal(torch.stack([table[place] for place in own]), call.extras[i][:, 0])
                for call, own in zip(calls, places, strict=True)
                if own
            )

        found = []
        for i in range(len(calls[0].extras)):
            extra = next((v for v, tensor in known.items() if is_extra(tensor, i)), None)
            if extra is None:
                raise NotUnderstood("its experts get numbers that it did not compute for all")
            found.append(extra)
        return tuple(found)

    def _may_be_numbers(self, tensor: Tensor) -> bool:
        tokens = self.recording.tokens
        if tensor.dtype not in (torch.int64, torch.int32) or tensor.numel() % tokens:
            return False
        if not 0 < tensor.numel() // tokens <= self._count:
            return False
        return bool(((tensor >= 0) & (tensor < self._count)).all())

    def _of_result(
        self, rows: Value, expert: Value, given: tuple[Value, ...], value: Value
    ) -> list[Routing]:
        known, tokens = self.recording.known, self.recording.tokens
        tensor = self.recording.read.get(value)
        number = known[expert].reshape(tokens, -1).long()
        width, choices = known[rows].shape[-1], number.shape[1]
        if tensor is None or not tensor.is_floating_point():
            return []
        cached: list[Tensor] = []
        extras = [known[extra] for extra in given]

        def experts(each: Tensor, numbers: Tensor, *others: Tensor) -> Tensor:
            if not cached:
                cached.append(self._experts(each, numbers, *others))
            return cached[0]

        tolerance = _TOLERANCE if self.recording.dtype.itemsize > 2 else _ROUNDED
        found = []
        for sums in (False, True):
            if tensor.numel() != tokens * width * (1 if sums else choices):
                continue
            for weight in (None, *known):
                values = None if weight is None else known[weight]
                sizes = (tokens * choices, tokens * self._count)
                if values is not None and not (
                    values.is_floating_point() and values.numel() in sizes
                ):
                    continue
                is_dense = values is not None and values.numel() != sizes[0]
                wanted = combined(experts, known[rows], number, values, extras, is_dense, sums)
                if is_close(tensor.reshape(wanted.shape), wanted, tolerance):
                    found.append(
                        Routing(
                            rows=rows,
                            expert=expert,
                            weight=weight,
                            is_dense=is_dense,
                            sums=sums,
                            extras=given,
                        )
                    )
        return sorted(found, key=lambda one: one.is_dense)


def common_routing(analyses: Sequence[Analysis]) -> tuple[Routing, list[Value]]:
    """The routing that explains all recordings, and where each has its result.

    What comes before the experts is numbered alike in all of them. Raises NotUnderstood.
    """
    first, *others = analyses
    possible = [set(other.choices()) for other in others]
    choices = [c for c in first.choices() if all(c in found for found in possible)]
    if not choices:
        raise NotUnderstood("its experts do not get rows of tokens by numbers that it computed")
    found = [analysis.routings(*choices[0]) for analysis in analyses]
    for routing in found[0][0]:
        if all(routing in routings for routings, _ in found):
            if any(analysis.branches_on_others(routing) for analysis in analyses):
                raise NotUnderstood("it may branch on other values than its experts' numbers")
            return routing, [result for _, result in found]
    raise NotUnderstood("it weighs the experts' results differently each time")


def is_close(found: Tensor, wanted: Tensor, tolerance: float = _TOLERANCE) -> bool:
    found, wanted = found.double(), wanted.double()
    limit = tolerance * float(wanted.abs().max())
    return bool((found - wanted).abs().max() <= limit)  # false for NaN


def _bits(row: Tensor) -> bytes:
    return bytes(row.contiguous().view(torch.uint8).numpy().tobytes())
